"""`polybus torture`: inject faults into a private bus, and check its guarantees."""

import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from polybus.bench import BenchError
from polybus.cli.common import exits
from polybus.cli.common.output import echo_json, echo_table, progress_bar, say, shown
from polybus.log.without_pandas import block_pandas
from polybus.torture.bus.control import library
from polybus.torture.campaign import COMPILED, FAULTS, FULL, ON_ONE_MACHINE, Campaign
from polybus.torture.faults.clients.storms import files_needed
from polybus.torture.report import INVARIANTS
from polybus.torture.rounds import Round

DEFAULT_S = 120.0
NOTES_MAX = 20
TELL_INTERVAL_S = 60.0
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def _seconds(context: click.Context, option: click.Parameter, text: str | None) -> float | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,6}(?:\.\d+)?)(s|m|h|)", text)
    if found is None:
        raise click.BadParameter("write a time like 90s, 2m or 1h")
    return float(found[1]) * _UNITS[found[2]]


def _round(context: click.Context, option: click.Parameter, text: str | None) -> Round | None:
    if text is None:
        return None
    fault, *numbers = text.split(":")
    if fault not in FAULTS or not re.fullmatch(r"[1-9]\d{0,8}(:[1-9]\d{0,8})?", ":".join(numbers)):
        raise click.BadParameter(f"write FAULT:NUMBER; faults are {', '.join(FAULTS)}")
    count = int(numbers[1]) if len(numbers) > 1 else FAULTS[fault].per_round
    return Round(fault, int(numbers[0]), count)


def _count_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """An option for each fault: how often to do it."""
    for name, fault in reversed(FAULTS.items()):
        command = click.option(
            f"--{name}", type=click.IntRange(1, 10**9), metavar="N", help=f"{fault.meaning}."
        )(command)
    return command


@click.command("torture")
@click.option("--for", "seconds", callback=_seconds, help="How long: 90s, 2m, 1h.  [default: 2m]")
@_count_options
@click.option(
    "--full", is_flag=True, help="The published counts of all faults, except those given."
)
@click.option(
    "--seed", type=click.IntRange(0, 2**32 - 1), help="Seed of the rounds; random if unset."
)
@click.option("--round", "one", callback=_round, metavar="FAULT:N", help="Run one round again.")
@click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path),
    help="Where the buses store their data: a folder on the disk to try.  [default: temp folder]",
)
@click.option(
    "--jobs",
    type=click.IntRange(1, 64),
    default=lambda: len(os.sched_getaffinity(0)),
    metavar="N",
    help="Rounds at a time.  [default: one a core]",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def torture(
    seconds: float | None,
    full: bool,
    seed: int | None,
    one: Round | None,
    folder: Path | None,
    jobs: int,
    as_json: bool,
    **counts: int | None,
) -> None:
    """Inject faults of every kind into a private bus, and check its guarantees after each fault.

    It starts real buses on free ports and folders of its own; no other bus is touched. It ends
    with a table: how often each fault was done, and how often each promise was broken. The exit
    code is 1 if one was; the folder of that round stays, and the command to run it again is
    printed. Rounds run at the same time, except those that measure time.

    \b
    Examples:
      polybus torture                          every fault in turn, two minutes
      polybus torture --for 1h --folder /srv   an hour, on the disk of /srv
      polybus torture --kills 1000 --flips 500 a number of some faults
      polybus torture --storms 10000           a storm of 10,000 clients
      polybus torture --nodes 100              faults in a cluster over Kafka
      polybus torture --full                   the published scale, about 80 minutes
      polybus torture --full --flips 500       the same with fewer flips
      polybus torture --seed 7 --round kills:3 one round again
    """
    chosen = {name: count for name, count in counts.items() if count is not None}
    if full:
        chosen = FULL | chosen
    if sum((seconds is not None, bool(chosen), one is not None)) > 1:
        raise click.UsageError("give only one of --for, --round and counts of faults or --full")
    if one is None:
        _check_files(chosen.get("storms", 0) if chosen else FAULTS["storms"].per_round)
    wanted = [one.fault] if one is not None else chosen or ON_ONE_MACHINE
    if any(fault in COMPILED for fault in wanted):
        try:
            library()
        except BenchError as error:
            raise click.ClickException(f"{error}; or ask for other faults") from error
    # Leave through every `finally`, so that no bus stays behind.
    signal.signal(signal.SIGTERM, exits.end_by_signal)
    block_pandas()
    seed = random.randrange(2**32) if seed is None else seed
    say(f"seed {seed}")
    place = Path(tempfile.mkdtemp(prefix=f"polybus-torture-{seed}-", dir=folder))
    with progress_bar("starting", hidden=as_json) as update:
        campaign = Campaign(place, seed, _teller(update, as_json=as_json), jobs)
        ended = _run(campaign, one, chosen, seconds or DEFAULT_S)
    if campaign.is_clean:
        # Interrupted rounds leave nothing to examine.
        shutil.rmtree(place)
    _show(campaign, as_json)
    if ended is not None:
        raise ended
    exits.end(good=campaign.is_clean)


def _run(
    campaign: Campaign, one: Round | None, counts: dict[str, int], seconds: float
) -> BaseException | None:
    """Run a round, or counts of faults, or all faults for a time; return what interrupted it."""
    try:
        if one is not None:
            campaign.run(iter([one]))
        elif counts:
            say(f"about {campaign.expected_s(counts) / 60:.0f} min")
            campaign.run_counts(counts)
        else:
            campaign.run_for(seconds, ON_ONE_MACHINE)
    except (KeyboardInterrupt, SystemExit) as error:
        return error
    return None


def _teller(update: Callable[..., None], *, as_json: bool) -> Callable[[str], None]:
    """Show progress on a terminal, or a line of it every minute."""
    told_s = time.monotonic()

    def tell(text: str) -> None:
        nonlocal told_s
        update(description=text)
        now_s = time.monotonic()
        if not sys.stderr.isatty() and not as_json and now_s - told_s >= TELL_INTERVAL_S:
            told_s = now_s
            say(text)

    return tell


def _check_files(clients: int) -> None:
    needed, hard = files_needed(clients), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if needed > hard:
        raise click.UsageError(
            f"{clients} clients in a storm need {needed} open files and the hard limit is {hard}: "
            "raise it (ulimit -Hn, or LimitNOFILE of a service), or ask for fewer"
        )


def _show(campaign: Campaign, as_json: bool) -> None:
    if as_json:
        keys = ("fault", "count", *INVARIANTS)
        faults = [dict(zip(keys, row, strict=True)) for row in campaign.rows()]
        told = {"faults": faults, "failures": campaign.failures, "notes": campaign.notes}
        echo_json({"seed": campaign.seed, **told})
        return
    echo_table(["fault", "count", *INVARIANTS], campaign.rows())
    for text in campaign.notes[-NOTES_MAX:] + campaign.failures:
        click.echo(shown(text))
