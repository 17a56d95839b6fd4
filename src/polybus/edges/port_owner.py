"""Which process listens on a port, if this user may know it (Linux)."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
LISTENING = "0A"
NAME_CHARS_MAX = 60


def port_owner(port: int, transport: str) -> str:
    """`process 123 (polybus serve)`, or an empty text if it is unknown."""
    sockets = {f"socket:[{inode}]" for inode in _inodes(port, transport)}
    for process in sorted(PROC.glob("[0-9]*")) if sockets else ():
        with contextlib.suppress(OSError):
            if any(str(one.readlink()) in sockets for one in (process / "fd").iterdir()):
                return f"process {process.name} ({_command(process)})"
    return ""


def _inodes(port: int, transport: str) -> Iterator[str]:
    """The inodes of sockets that are bound to the port; for TCP, of listening ones."""
    for table in (transport, f"{transport}6"):
        with contextlib.suppress(OSError):
            for line in (PROC / "net" / table).read_text().splitlines()[1:]:
                words = line.split()
                is_listening = transport == "udp" or words[3] == LISTENING
                if is_listening and int(words[1].rpartition(":")[2], 16) == port:
                    yield words[9]


def _command(process: Path) -> str:
    words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
    if Path(words[0]).name.startswith("python") and len(words) > 2:
        # The program, not its interpreter.
        del words[: 2 if words[1] == "-m" else 1]
    text = " ".join([Path(words[0]).name, *words[1:]]).strip()
    shown = "".join(char if char.isprintable() else "?" for char in text)
    return shown if len(shown) <= NAME_CHARS_MAX else f"{shown[: NAME_CHARS_MAX - 1]}…"
