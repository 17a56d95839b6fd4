"""Checks for every bus after its faults: its files, its log, its memory, its exit."""

from polybus.torture.bus.child import GROWTH_BYTES_MAX, BusChild
from polybus.torture.load.load import Load
from polybus.torture.report import Findings


async def check_files(child: BusChild, findings: Findings) -> None:
    """The files of a bus that was not corrupted are intact, and its log has no exception."""
    if not child.data.exists():
        return
    report = await child.verified()
    if isinstance(report, str):
        findings.violated("verify", report)
    elif not report.intact:
        findings.violated("verify", f"damage in files that were not corrupted: {report.damages[0]}")
    await check_log(child, findings)


async def check_log(child: BusChild, findings: Findings) -> None:
    """The bus's log has no exception, and its memory has not grown."""
    await child.settle()
    if child.grown_bytes() > GROWTH_BYTES_MAX:
        text = f"{child.grown_bytes() >> 20} MiB more than at the start"
        findings.violated("memory", text)
    check_exceptions(child, findings)


def check_exceptions(child: BusChild, findings: Findings) -> None:
    """The bus's log has no exception."""
    lines = child.log_text.splitlines()
    for number, line in enumerate(lines):
        if line.startswith(("Traceback ", "Fatal Python error")):
            end = next((one for one in lines[number + 1 :] if not one.startswith(" ")), line)
            findings.violated("errors", f"in the bus's log: {end}")
            return


async def finish_round(child: BusChild, load: Load) -> None:
    """Start one more bus without a fault: it must have everything, and stop cleanly."""
    findings = load.findings
    if not await child.start():
        findings.violated("starts", f"no start; see {child.folder}/bus.log")
        return
    await load.finish()
    code = await child.stop()
    if code != 0:
        findings.violated("starts", f"exit code {code} after SIGTERM")
    await check_files(child, findings)
