"""`polybus completion`: commands, options and verbs are completed with the tab key."""

import os
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from polybus.cli.common.output import say
from polybus.errors import UsageError

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_POLYBUS_COMPLETE"
ZSH_LINE = 'eval "$(polybus completion zsh)"'


@click.command(
    epilog="""\b
Examples:
  polybus completion --install
  eval "$(polybus completion bash)"
"""
)
@click.argument("shell", type=click.Choice(SHELLS), required=False)
@click.option("--install", is_flag=True, help="Set it up for every new shell of this user.")
def completion(shell: str | None, install: bool) -> None:
    """Print the completion script of a shell, or install it. By default SHELL is your shell."""
    name = shell or Path(os.environ.get("SHELL", "")).name
    if name not in SHELLS:
        shown = f"the shell {name}" if name else "this shell"
        raise UsageError("shell.unknown", f"there is no completion for {shown}")
    if not install:
        click.echo(script(name))
        return
    path = _install(name)
    say(f"installed in {path}; new shells have it")


def script(shell: str) -> str:
    """The script for a shell."""
    from polybus.cli import main

    made = get_completion_class(shell)
    assert made is not None
    return str(made(main, {}, "polybus", VARIABLE).source())


def _install(shell: str) -> Path:
    """Write the completion file of the shell; zsh has none, so add a line to its startup file."""
    if shell == "zsh":
        path = Path(os.environ.get("ZDOTDIR") or Path.home()) / ".zshrc"
        before = path.read_text() if path.exists() else ""
        if ZSH_LINE not in before:
            path.write_text(f"{before}\n# Completion of polybus.\n{ZSH_LINE}\n".lstrip("\n"))
        return path
    if shell == "fish":
        base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
        path = Path(base) / "fish" / "completions" / "polybus.fish"
    else:
        base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
        path = Path(base) / "bash-completion" / "completions" / "polybus"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script(shell) + "\n")
    return path
