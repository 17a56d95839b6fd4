"""Build the compiled scanner; everything else is in pyproject.toml.

The extensions are optional: without a C compiler the install still succeeds and the bus runs on
the pure-Python twins in `polybus/scan` (`polybus doctor` says so).
"""

from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

SCAN = Path("src/polybus/scan")
# batch.py is compiled as it is, with the types of batch.pxd.
MODULES = [SCAN / "batch.py", *sorted(SCAN.glob("*.pyx"))]

setup(
    ext_modules=cythonize(
        [
            Extension(
                f"polybus.scan.{path.stem}",
                [str(path)],
                extra_compile_args=["-O3"],
                optional=True,
            )
            for path in MODULES
        ],
        language_level=3,
    )
)
