"""Does an installed Polybus run on its own? `make smoke` and `make smoke-pure` run this.

The argument is the form of the scanner that `polybus doctor` has to name.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

POLYBUS = str(Path(sys.executable).parent / "polybus")


def run(*words: str) -> str:
    done = subprocess.run([POLYBUS, *words], capture_output=True, text=True, timeout=60)
    if done.returncode:
        sys.exit(f"polybus {' '.join(words)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> None:
    print(run("--version").strip())
    with tempfile.TemporaryDirectory() as folder:
        doctor = run("doctor", "--data", folder)
        scanner = next(line for line in doctor.splitlines() if "scanner" in line)
        if sys.argv[1] not in scanner:
            sys.exit(f"not {sys.argv[1]}: {scanner}")
        print(scanner)
        serve = [POLYBUS, "serve", "--port", "0", "--topic", "news", "--data", folder]
        with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as bus:
            try:
                assert bus.stdout is not None
                line = bus.stdout.readline()
                port = re.search(r"tcp://127\.0\.0\.1:(\d+)", line)
                assert port is not None, line
                for scheme in ("boson", "goms", "ws"):
                    url = f"{scheme}://127.0.0.1:{port[1]}"
                    run("publish", "news", f"hello on {scheme}", "--url", url)
                url = f"boson://127.0.0.1:{port[1]}"
                seen = run("tail", "news", "--from", "earliest", "--count", "3", "--url", url)
                assert len(seen.splitlines()) == 3, seen
            finally:
                bus.terminate()
            assert bus.wait(30) == 0
        print(run("verify", "--data", folder).strip())
    print("the install works")


if __name__ == "__main__":
    main()
