"""Build the compiled scanner, pump and sessions; everything else is in pyproject.toml.

The extensions are optional: without a C compiler the install still succeeds and the bus runs on
the pure-Python twins in `polybus/scan` (`polybus doctor` says so).
"""

from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

SOURCE = Path("src")
SCAN, TCP = SOURCE / "polybus/scan", SOURCE / "polybus/edges/tcp"
SESSIONS = SOURCE / "polybus/services/sessions"
# The .py files are compiled as they are, some with the types of a .pxd.
MODULES = [
    *sorted(SCAN.glob("*.pyx")),
    *sorted(TCP.glob("*.pyx")),
    SCAN / "batch.py",
    TCP / "handling.py",
    TCP / "outbox.py",
    TCP / "pump.py",
    TCP / "transport.py",
    SOURCE / "polybus/edges/http/sending.py",
    SOURCE / "polybus/log/journal/_writing.pyx",
    SOURCE / "polybus/log/journal/message.py",
    SESSIONS / "contents.py",
    SESSIONS / "delivery.py",
    SESSIONS / "sequence.py",
    SESSIONS / "session.py",
    SOURCE / "polybus/services/tallies.py",
]

extensions = cythonize(
    [
        Extension(
            ".".join(path.relative_to(SOURCE).with_suffix("").parts),
            [str(path)],
            extra_compile_args=["-O3"],
        )
        for path in MODULES
    ],
    language_level=3,
)
for extension in extensions:
    # Not above: `cythonize` makes other objects and forgets it.
    extension.optional = True

setup(ext_modules=extensions)
