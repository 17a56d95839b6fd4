"""Polybus as one zip file, for the Python processes of a cluster where it is not installed.

The zip has only pure Python modules: Python loads no compiled module from a zip, and readers and
writers do not need the compiled scanner. The dependencies of Polybus (pyarrow, msgspec, xxhash)
must be installed on the workers.
"""

import atexit
import functools
import shutil
import tempfile
import zipfile
from pathlib import Path

import polybus
from polybus import __version__

# Packages that no worker uses.
LEFT_OUT = ("bench", "cli", "testing")
EPOCH = (1980, 1, 1, 0, 0, 0)


@functools.cache
def package() -> Path:
    """The path of the zip for `addPyFile`. It is written once and removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="polybus-ship-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / f"polybus-{__version__}.zip"
    source = Path(polybus.__file__).parent
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(source.rglob("*.py")):
            name = file.relative_to(source)
            if name.parts[0] not in LEFT_OUT:
                _add(archive, f"polybus/{name.as_posix()}", file)
        _add(archive, "pyspark_polybus.py", source.parent / "pyspark_polybus.py")
    return path


def _add(archive: zipfile.ZipFile, name: str, file: Path) -> None:
    # With a fixed time, the same code results in the same zip.
    info = zipfile.ZipInfo(name, EPOCH)
    info.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(info, file.read_bytes())
