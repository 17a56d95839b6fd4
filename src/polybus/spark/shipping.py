"""Polybus as one zip file, for the Python processes of a cluster where it is not installed.

The zip has only pure Python modules: Python loads no compiled module from a zip, and readers and
writers do not need the compiled scanner. The dependencies of Polybus (pyarrow, msgspec, xxhash)
must be installed on the workers.
"""

import atexit
import functools
import zipfile
from pathlib import Path

import polybus
from polybus import __version__
from polybus.processes import new_scratch, remove_scratch

# Packages that no worker uses.
LEFT_OUT = ("bench", "cli", "testing")


@functools.cache
def package() -> Path:
    """The path of the zip for `addPyFile`. It is written once and removed when the process ends."""
    folder = new_scratch("ship")
    atexit.register(remove_scratch, folder)
    path = folder / f"polybus-{__version__}.zip"
    source = Path(polybus.__file__).parent
    modules = [
        one for one in source.rglob("*.py") if one.relative_to(source).parts[0] not in LEFT_OUT
    ]
    with zipfile.ZipFile(path, "w") as archive:
        for file in (*sorted(modules), source.parent / "pyspark_polybus.py"):
            # It has a fixed time, so the same code results in the same zip.
            info = zipfile.ZipInfo(file.relative_to(source.parent).as_posix())
            archive.writestr(info, file.read_bytes(), zipfile.ZIP_DEFLATED)
    return path
