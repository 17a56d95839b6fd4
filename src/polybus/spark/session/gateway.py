"""Starts the JVM that PySpark talks to, directly and not through `spark-submit`.

PySpark's own way starts two JVMs and a shell one after the other, demands a Java module that small
runtimes lack (`jdk.incubator.vector`), and sets `SPARK_HOME`, which makes every Python worker
import PySpark from a zip without compiled files. Ours starts one JVM with bounded memory, quiet
logs and, where there is one, an archive of its classes; docs/decisions/0010-embedded-spark.md has
the figures.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import struct
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from polybus.errors import PolybusError
from polybus.spark.session import archive
from polybus.spark.session.java import Java, find_java

NONE: Mapping[str, str] = MappingProxyType({})
START_TIMEOUT_S = 90.0
LAST_LINES = 10
# What Spark's own launcher passes, less the module that is not in every runtime.
OPENED = (
    *("java.lang", "java.lang.invoke", "java.lang.reflect", "java.io", "java.net", "java.nio"),
    *("java.util", "java.util.concurrent", "java.util.concurrent.atomic", "jdk.internal.ref"),
    *("sun.nio.ch", "sun.nio.cs", "sun.util.calendar"),
)
# Java complains of a package that it does not have any more.
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
    "-XX:MaxMetaspaceSize=256m",
    "-XX:ReservedCodeCacheSize=128m",
)
# The thorough compiler waits for what is really hot (ten times its usual thresholds): most of what
# it would compile in the first seconds is run only then. It cost a quarter of the start.
COMPILER_OPTIONS = (
    "-XX:Tier4InvocationThreshold=50000",
    "-XX:Tier4MinInvocationThreshold=6000",
    "-XX:Tier4CompileThreshold=150000",
    "-XX:Tier4BackEdgeThreshold=400000",
)
# The JVM's own warnings too: an archive that does not fit any more is not the user's concern.
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
    """The command of a JVM for Spark, up to the class it is to run."""
    settings = scratch / "log4j2.properties"
    settings.write_text(LOG_SETTINGS)
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
        "-cp",
        class_path(),
    ]


def class_path() -> str:
    """PySpark's jars in a fixed order, because an archive of classes fits one order only."""
    return os.pathsep.join(str(jar) for jar in sorted(archive.jars_folder().glob("*.jar")))


class Jvm:
    """A JVM that waits for a PySpark; it ends when this process does, however that ends."""

    def __init__(
        self,
        *,
        memory: str,
        loopback: bool = True,
        log: Path | None = None,
        jars: Mapping[str, str] = NONE,
    ) -> None:
        """Start it, and return before it is ready.

        `jars` are settings like `spark.jars.packages`, which must be known before Spark starts.

        Raises:
            PolybusError: `spark.no-java`.
        """
        self.java = find_java()
        self._loopback = loopback
        self.scratch = private_folder()
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._note = self.scratch / "gateway"
        command = java_command(
            self.java, memory=memory, scratch=self.scratch, log=log or self.scratch / "spark.log"
        )
        command.append("org.apache.spark.deploy.SparkSubmit")
        for name, value in jars.items():
            command += ["--conf", f"{name}={value}"]
        self.process = subprocess.Popen(
            [*command, "pyspark-shell"],
            # The JVM ends when this pipe closes, also if we are killed.
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=self._environment(),
            # Ctrl-C is for us: we end the queries first and the JVM last.
            preexec_fn=_ignore_interrupt,
        )
        self._listener = threading.Thread(
            target=self._pass_on_errors, name="polybus-jvm", daemon=True
        )
        self._listener.start()

    def _environment(self) -> dict[str, str]:
        left_out = ("SPARK_HOME", "CLASSPATH", "JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS")
        kept = {name: value for name, value in os.environ.items() if name not in left_out}
        kept["_PYSPARK_DRIVER_CONN_INFO_PATH"] = str(self._note)
        kept["SPARK_CONNECT_MODE"] = "0"
        if self._loopback:
            # Spark else looks up the host's name, which may take long where there is no network.
            kept["SPARK_LOCAL_IP"] = "127.0.0.1"
        return kept

    def _pass_on_errors(self) -> None:
        """What the JVM and its Python workers say on standard error is for ours."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            text = line.decode(errors="replace").rstrip()
            self._last_lines.append(text)
            with contextlib.suppress(OSError, ValueError):
                os.write(2, line)

    def wait(self) -> tuple[int, str]:
        """The port and the secret with which PySpark reaches it.

        Raises:
            PolybusError: `spark.start-failed` with what Java said.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._note.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                said = " | ".join(self._last_lines)
                java = f"Java {self.java.version} at {self.java.path}"
                text = f"{java} did not start Spark: {said or 'it said nothing'}"
                raise PolybusError("spark.start-failed", text)
            time.sleep(0.02)
        raw = self._note.read_bytes()
        self._note.unlink()
        (port,) = struct.unpack_from("!i", raw)
        (secret_bytes,) = struct.unpack_from("!i", raw, 4)
        return port, raw[8 : 8 + secret_bytes].decode()

    @contextlib.contextmanager
    def offered(self) -> Iterator[None]:
        """For the time of a block, PySpark takes this JVM and starts none of its own."""
        port, secret = self.wait()
        known = {"PYSPARK_GATEWAY_PORT": str(port), "PYSPARK_GATEWAY_SECRET": secret}
        os.environ.update(known)
        try:
            yield
        finally:
            # A child that is to start a Spark of its own must not find this one's.
            for name in known:
                del os.environ[name]

    def kill(self) -> None:
        """End one that did not come up."""
        self.process.kill()
        self._listener.join()
        # Closes the pipes too.
        self.process.communicate()


def _ignore_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def private_folder() -> Path:
    """A folder of our own for what Spark writes while it runs; removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="polybus-spark-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
