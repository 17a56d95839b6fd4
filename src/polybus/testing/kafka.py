"""A real Kafka cluster on this machine, for trials and tests: brokers that can be killed.

The jars come once through Maven, by the pom beside this file, into the user's cache; nothing else
needs a network. Every broker is a controller too (KRaft). The output of `kafka-storage format` is a
file of four lines, so this writes it without Java. The first clean stop writes an archive of the
loaded classes, which halves the next start.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
import uuid
from pathlib import Path

from polybus.errors import ConfigError, StorageError
from polybus.spark.session.archive import cache_folder
from polybus.spark.session.java import find_java

POM = Path(__file__).with_name("kafka-pom.xml")
VERSION = "4.3.1"
HOST = "127.0.0.1"
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0
POLL_S = 0.05
JAVA_OPTIONS = ("-Xmx256m", "-XX:+UseSerialGC", "-Xshare:auto", "-Xlog:disable")
# In a short run most code runs only a few times, so the second compiler does not pay off.
BRIEF_OPTIONS = ("-XX:TieredStopAtLevel=1",)
# Small enough for three brokers and three nodes on one machine of two cores.
PROPERTIES = """\
process.roles=broker,controller
node.id={number}
controller.quorum.voters={voters}
listeners=PLAINTEXT://{host}:{port},CONTROLLER://{host}:{controller_port}{secure}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
log.dirs={data}
auto.create.topics.enable=false
default.replication.factor={replicas}
min.insync.replicas={insync}
offsets.topic.replication.factor={replicas}
offsets.topic.num.partitions=1
transaction.state.log.replication.factor={replicas}
transaction.state.log.min.isr={insync}
transaction.state.log.num.partitions=1
group.initial.rebalance.delay.ms=0
log.cleaner.dedupe.buffer.size=4194304
controlled.shutdown.enable=false
num.network.threads=1
num.io.threads=2
"""
FAR = """\
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,FAR:PLAINTEXT
advertised.listeners=PLAINTEXT://{host}:{port},FAR://{host}:{far_port}
"""
LOGGING = """\
rootLogger.level=WARN
rootLogger.appenderRef.console.ref=console
appender.console.type=Console
appender.console.name=console
appender.console.layout.type=PatternLayout
appender.console.layout.pattern=%d %p %m%n
"""


def kafka_jars() -> Path:
    """The folder with Kafka's jars, which Maven downloads if they are missing.

    Raises:
        ConfigError: `cluster.no-kafka` if Maven is missing or failed.
    """
    folder = cache_folder() / f"kafka-{VERSION}"
    if folder.is_dir():
        return folder
    maven = shutil.which("mvn")
    if maven is None:
        text = "Maven fetches Kafka's jars, and it is not installed; install the package maven"
        raise ConfigError("cluster.no-kafka", text)
    made = folder.with_name(f"{folder.name}.{os.getpid()}")
    goal = "dependency:copy-dependencies"
    wanted = ["-DincludeScope=runtime", f"-DoutputDirectory={made}"]
    command = [maven, "-q", "-B", "-f", str(POM), goal, *wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not made.is_dir():
        said = (done.stdout + done.stderr).strip()[-500:]
        raise ConfigError("cluster.no-kafka", f"Maven could not fetch Kafka's jars: {said}")
    with contextlib.suppress(OSError):
        # Another process may have been faster.
        made.rename(folder)
    shutil.rmtree(made, ignore_errors=True)
    return folder


class KafkaBrokers:
    """The brokers of one cluster in one folder; a later object on the folder continues it."""

    def __init__(
        self, folder: Path, *, count: int = 3, secure: str = "", is_brief: bool = False
    ) -> None:
        """`secure` has the properties of another listener, `SECURE`, if there is to be one.

        Brokers that do not live long (`is_brief`) start sooner, and are slower at their best.
        """
        self.folder = folder
        self.count = count
        self._secure = secure
        self._java_options = JAVA_OPTIONS + (BRIEF_OPTIONS if is_brief else ())
        self._far: list[int] = []
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        note = folder / "ports.json"
        if note.exists():
            self._ports: list[int] = json.loads(note.read_text())
        else:
            folder.mkdir(parents=True, exist_ok=True)
            self._ports = _free_ports(3 * count)
            note.write_text(json.dumps(self._ports))

    @property
    def addresses(self) -> list[str]:
        """`host:port` of each broker."""
        return [f"{HOST}:{port}" for port in self._ports[: self.count]]

    @property
    def url(self) -> str:
        """The value of the setting `log`."""
        return "kafka://" + ",".join(self.addresses)

    @property
    def secure_url(self) -> str:
        """The value of the setting `log` that uses the listener `SECURE`."""
        return "kafka://" + ",".join(f"localhost:{port}" for port in self._ports[2 * self.count :])

    @property
    def far_targets(self) -> list[int]:
        """The ports of another listener, `FAR`, for links that are cut."""
        return self._ports[2 * self.count :]

    def advertise_far(self, ports: list[int]) -> None:
        """Before the start: the brokers say that their listeners `FAR` are at these ports."""
        self._far = ports

    @property
    def far_url(self) -> str:
        """The value of the setting `log` that uses the listeners `FAR`."""
        return "kafka://" + ",".join(f"{HOST}:{port}" for port in self._far)

    def controller(self) -> int | None:
        """The broker that is the controller, as the brokers last noted; None if there is none."""
        found = []
        for note in self.folder.glob("broker-*/data/__cluster_metadata-0/quorum-state"):
            with contextlib.suppress(OSError, ValueError):
                state = json.loads(note.read_text())
                found.append((state["leaderEpoch"], state["leaderId"]))
        number = max(found, default=(0, -1))[1]
        return number if number > 0 else None

    def pid(self, number: int) -> int:
        """The process of a broker; they count from 1."""
        return self._processes[number].pid

    def is_running(self, number: int) -> bool:
        return self._processes[number].poll() is None

    def start(self) -> None:
        """Return when all brokers answer. Raises ConfigError, StorageError `cluster.failed`."""
        for number in range(1, self.count + 1):
            self.launch(number)
        for number in range(1, self.count + 1):
            self.wait(number)

    def launch(self, number: int) -> None:
        """Start one broker, without waiting for it."""
        jars = kafka_jars()
        home = self.folder / f"broker-{number}"
        data = home / "data"
        data.mkdir(parents=True, exist_ok=True)
        self._write(home, data, number)
        java = find_java()
        archive = jars.with_name(f"{jars.name}-java-{java.version}.archive")
        options = [*self._java_options]
        if archive.exists():
            options.append(f"-XX:SharedArchiveFile={archive}")
        elif number == 1:
            options.append(f"-XX:ArchiveClassesAtExit={home / 'classes'}")
        options += [f"-Dlog4j2.configurationFile={home / 'logging.properties'}", "-cp", f"{jars}/*"]
        with (home / "output").open("ab") as output:
            self._processes[number] = subprocess.Popen(
                [str(java.path), *options, "kafka.Kafka", str(home / "server.properties")],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._archive = archive

    def _write(self, home: Path, data: Path, number: int) -> None:
        voters = ",".join(
            f"{one}@{HOST}:{self._ports[self.count + one - 1]}" for one in range(1, self.count + 1)
        )
        text = PROPERTIES.format(
            number=number,
            voters=voters,
            host=HOST,
            port=self._ports[number - 1],
            controller_port=self._ports[self.count + number - 1],
            data=data,
            secure=self._third_listener(number),
            replicas=min(3, self.count),
            insync=min(2, self.count),
        )
        if self._far:
            port, far_port = self._ports[number - 1], self._far[number - 1]
            text += FAR.format(host=HOST, port=port, far_port=far_port)
        (home / "server.properties").write_text(text + self._secure)
        (home / "logging.properties").write_text(LOGGING)
        meta = data / "meta.properties"
        if not meta.exists():
            cluster = _short(uuid.uuid5(uuid.NAMESPACE_URL, str(self._ports)))
            lines = ["version=1", f"cluster.id={cluster}", f"node.id={number}"]
            lines.append(f"directory.id={_short(uuid.uuid4())}")
            meta.write_text("\n".join(lines) + "\n")

    def _third_listener(self, number: int) -> str:
        port = self._ports[2 * self.count + number - 1]
        if self._far:
            return f",FAR://{HOST}:{port}"
        return f",SECURE://localhost:{port}" if self._secure else ""

    def wait(self, number: int) -> None:
        """Wait until a broker answers. Raises StorageError `cluster.failed`."""
        process = self._processes[number]
        deadline = time.monotonic() + START_TIMEOUT_S
        pause = threading.Event()
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                socket.create_connection((HOST, self._ports[number - 1]), 1.0).close()
                return
            pause.wait(POLL_S)
        output = (self.folder / f"broker-{number}" / "output").read_text(errors="replace")
        text = f"Kafka broker {number} did not start: {output[-800:]}"
        raise StorageError("cluster.failed", text)

    def kill(self, number: int) -> None:
        """End a broker at once, as a power cut would."""
        self.signal(number, signal.SIGKILL)
        self._processes[number].wait()

    def signal(self, number: int, what: signal.Signals) -> None:
        """SIGSTOP pauses a broker, SIGCONT continues it."""
        self._processes[number].send_signal(what)

    def stop(self) -> None:
        """End all brokers. The folder can be started again."""
        running = [one for one in self._processes.values() if one.poll() is None]
        for process in running:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in running:
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        made = self.folder / "broker-1" / "classes"
        if made.exists():
            shutil.move(made, self._archive)
        self._processes.clear()


def _short(number: uuid.UUID) -> str:
    return base64.urlsafe_b64encode(number.bytes).rstrip(b"=").decode()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((HOST, 0))
        return [one.getsockname()[1] for one in sockets]
