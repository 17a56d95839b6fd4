"""Starts the JVM that PySpark talks to, directly and not through `spark-submit`.

`spark-submit` starts two JVMs and a shell in sequence, requires a Java module that small runtimes
lack (`jdk.incubator.vector`), and sets `SPARK_HOME`, which makes every Python worker import PySpark
from a zip without compiled files. This module starts one JVM with bounded memory, quiet logs and,
if it exists, an archive of its classes. docs/decisions/0010-embedded-spark.md has measurements.
"""

import atexit
import contextlib
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path

from polybus.errors import PolybusError
from polybus.processes import new_scratch, remove_scratch
from polybus.spark.internals import (
    CONNECT_MODE,
    GATEWAY_APPLICATION,
    GATEWAY_FILE,
    GATEWAY_MAIN,
    GATEWAY_PORT,
    GATEWAY_SECRET,
    java_errors,
)
from polybus.spark.session import archive
from polybus.spark.session.java import Java, find_java

START_TIMEOUT_S = 90.0
LAST_LINES = 10
ENDED_TIMEOUT_S = 3.0
"""How long a program may take to end by itself after its JVM has ended."""
# The options of Spark's own launcher, without the module that some runtimes lack.
OPENED = (
    *("java.lang", "java.lang.invoke", "java.lang.reflect", "java.io", "java.net", "java.nio"),
    *("java.util", "java.util.concurrent", "java.util.concurrent.atomic", "jdk.internal.ref"),
    *("sun.nio.ch", "sun.nio.cs", "sun.util.calendar"),
)
# Later versions of Java warn that the package does not exist.
OPENED_UNTIL_23 = "--add-opens=java.base/sun.security.action=ALL-UNNAMED"
MODULE_OPTIONS = (
    "-XX:+IgnoreUnrecognizedVMOptions",
    *(f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in OPENED),
    "--add-opens=java.security.jgss/sun.security.krb5=ALL-UNNAMED",
    "-Dio.netty.tryReflectionSetAccessible=true",
    "-Dio.netty.allocator.type=pooled",
    "--sun-misc-unsafe-memory-access=allow",
    "--enable-native-access=ALL-UNNAMED",
)
# With a heap of 1 GiB and a few Python workers all of Spark stays within 2 GiB.
MEMORY_OPTIONS = (
    "-XX:+UseSerialGC",
    "-Xms256m",
    "-XX:MaxDirectMemorySize=256m",
    # JSON may be nested 1,000 deep, and Spark writes it by recursion: an overflow ends the JVM.
    "-Xss4m",
    "-XX:MaxMetaspaceSize=256m",
    "-XX:ReservedCodeCacheSize=128m",
)
# C2 compiles only very hot code (ten times its default thresholds): most of what it would compile
# in the first seconds runs only then, and that took a quarter of the start time.
COMPILER_OPTIONS: tuple[str, ...] = (
    "-XX:Tier4InvocationThreshold=50000",
    "-XX:Tier4MinInvocationThreshold=6000",
    "-XX:Tier4CompileThreshold=150000",
    "-XX:Tier4BackEdgeThreshold=400000",
)
# Also silences warnings about an archive that no longer fits.
QUIET_OPTIONS = ("-Xlog:disable",)
LOG_SETTINGS = """\
status = off
rootLogger.level = warn
rootLogger.appenderRef.console.ref = console
rootLogger.appenderRef.file.ref = file
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = spark: %p %c{1}: %m%n%ex{short}
appender.console.filter.level.type = ThresholdFilter
appender.console.filter.level.level = error
appender.file.type = RollingFile
appender.file.name = file
appender.file.fileName = ${sys:polybus.log}
appender.file.filePattern = ${sys:polybus.log}.%i
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d{yyyy-MM-dd'T'HH:mm:ss.SSS} %p %c: %m%n%ex
appender.file.policies.type = Policies
appender.file.policies.size.type = SizeBasedTriggeringPolicy
appender.file.policies.size.size = 4MB
appender.file.strategy.type = DefaultRolloverStrategy
appender.file.strategy.max = 2
"""


def java_command(java: Java, *, memory: str, scratch: Path, log: Path) -> list[str]:
    """The command of a JVM for Spark, without the class to run."""
    settings = scratch / "log4j2.properties"
    settings.write_text(LOG_SETTINGS)
    # In a fixed order, because an archive of classes fits one order only.
    jars = os.pathsep.join(str(jar) for jar in sorted(archive.jars_folder().glob("*.jar")))
    return [
        str(java.path),
        *QUIET_OPTIONS,
        *MODULE_OPTIONS,
        *([OPENED_UNTIL_23] if java.major <= 23 else []),
        *MEMORY_OPTIONS,
        *COMPILER_OPTIONS,
        f"-Xmx{memory}",
        *archive.options(java),
        f"-Dlog4j2.configurationFile={settings}",
        f"-Dpolybus.log={log}",
        f"-Djava.io.tmpdir={scratch}",
        "-Djava.net.preferIPv4Stack=true",
        *("-cp", jars),
    ]


class Jvm:
    """A JVM that PySpark connects to. It ends when this process ends, however that happens.

    If it ends first, no Spark query of this process can continue, and the process cannot start
    another JVM. Calls of Spark then fail, but a program that only waits for its queries would wait
    forever. So the process ends too, with `spark.ended`, except in an interactive session.
    """

    def __init__(
        self,
        *,
        memory: str,
        loopback: bool = True,
        log: Path | None = None,
        jars: Mapping[str, str] | None = None,
    ) -> None:
        """Start the JVM, and return before it is ready.

        `jars` are settings like `spark.jars.packages`, which must be known before Spark starts.

        Raises:
            PolybusError: `spark.no-java`.
        """
        self.java = find_java()
        self.scratch = new_scratch("spark")
        atexit.register(remove_scratch, self.scratch)
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._is_ending = threading.Event()
        """The JVM ends because this process does, or another part watches it."""
        self._is_said = threading.Event()
        atexit.register(self._leave)
        self._address = self.scratch / "gateway"
        log = log or self.scratch / "spark.log"
        settings = [part for item in (jars or {}).items() for part in ("--conf", "=".join(item))]
        self.process = subprocess.Popen(
            [
                *java_command(self.java, memory=memory, scratch=self.scratch, log=log),
                *(GATEWAY_MAIN, *settings, GATEWAY_APPLICATION),
            ],
            # The JVM ends when this pipe closes, also if this process is killed.
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=self._environment(loopback),
            # On Ctrl-C this process stops the queries first and the JVM last.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        )
        self._listener = threading.Thread(
            target=self._forward_errors, name="polybus-jvm", daemon=True
        )
        self._listener.start()
        if os.environ.get(archive.RECORD_VARIABLE):
            atexit.register(self._await_end)

    def _environment(self, loopback: bool) -> dict[str, str]:
        removed = {"SPARK_HOME", "CLASSPATH", "JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS"}
        # Spark would look for data sources with it, even if it is a notebook's program.
        removed.add("PYSPARK_DRIVER_PYTHON")
        kept = {name: value for name, value in os.environ.items() if name not in removed}
        kept[GATEWAY_FILE] = str(self._address)
        kept[CONNECT_MODE] = "0"
        if loopback:
            # Otherwise Spark resolves the name of the host, which is slow without a network.
            kept["SPARK_LOCAL_IP"] = "127.0.0.1"
        return kept

    def _forward_errors(self) -> None:
        """Copy the standard error of the JVM and its Python workers to our own."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._last_lines.append(line.decode(errors="replace").rstrip())
            with contextlib.suppress(OSError, ValueError):
                os.write(2, line)

    def leave_alone(self) -> None:
        """Do not end this process after the JVM: the caller does that."""
        self._is_ending.set()

    def kill(self) -> None:
        """End the JVM, not this process, at once and from any thread."""
        self._is_ending.set()
        self.process.kill()
        self.process.wait()

    def _leave(self) -> None:
        """Before this process exits, let `_end_with_it` report if the JVM is the reason.

        The system ends the connections of a killed JVM first, and then frees its memory.
        """
        error = getattr(sys, "last_value", None)
        if error is not None and isinstance(error, ConnectionError | java_errors()):
            self._is_said.wait(ENDED_TIMEOUT_S)
        self._is_ending.set()

    def _end_with_it(self) -> None:
        code = self.process.wait()
        if self._is_ending.is_set():
            return
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        advice = "start the program again: its queries continue from their checkpoints"
        text = f"the Java process {self.process.pid} of Spark {how}; {advice}"
        with contextlib.suppress(OSError):
            os.write(2, f"{PolybusError('spark.ended', text)}\n".encode())
        self._is_said.set()
        if _is_interactive():
            return
        # Calls of Spark fail now, and a program may handle that and exit.
        threading.main_thread().join(ENDED_TIMEOUT_S)
        if not threading.main_thread().is_alive():
            time.sleep(ENDED_TIMEOUT_S)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        remove_scratch(self.scratch)
        # Threads that wait for an answer of the JVM would keep the process.
        os._exit(1)

    def wait(self) -> tuple[int, str]:
        """The port and the secret with which PySpark connects.

        Raises:
            PolybusError: `spark.start-failed`, with the output of Java.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._address.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self._is_ending.set()
                self.process.kill()
                self._listener.join()
                self.process.communicate()  # Also closes the pipes.
                java = f"Java {self.java.version} at {self.java.path}"
                said = " | ".join(self._last_lines) or "it printed nothing"
                raise PolybusError("spark.start-failed", f"{java} did not start Spark: {said}")
            time.sleep(0.02)
        threading.Thread(target=self._end_with_it, name="polybus-jvm-end", daemon=True).start()
        raw = self._address.read_bytes()
        self._address.unlink()
        port, secret_bytes = struct.unpack_from("!ii", raw)
        return port, raw[8 : 8 + secret_bytes].decode()

    @contextlib.contextmanager
    def offered(self) -> Iterator[None]:
        """Inside the block, PySpark connects to this JVM and does not start its own."""
        port, secret = self.wait()
        variables = {GATEWAY_PORT: str(port), GATEWAY_SECRET: secret}
        os.environ.update(variables)
        try:
            yield
        finally:
            # A child process that starts its own Spark must not find this JVM.
            for name in variables:
                del os.environ[name]

    def _await_end(self) -> None:
        """Wait until the JVM has written the archive of its classes, which it does as it exits."""
        self._is_ending.set()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def _is_interactive() -> bool:
    """Whether a person would lose more than the queries: a shell of Python, a notebook."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or "ipykernel" in sys.modules
