"""The commands for a person who looks after a journal: verify, backup, restore, salvage. They need no coordinator."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from coordinator.commands.common import AsJson, JournalUrl, print_json, say
from coordinator.config import DATA_DIR_TEXT, JOURNAL_VARIABLE, checked_journal, default_data_dir
from coordinator.journal import salvage as salvaging
from coordinator.journal import upkeep
from coordinator.journal.upkeep import Summary
from eval_kernel.errors import ConfigError

DataDir = Annotated[
    Path | None, typer.Option("--data-dir", metavar="DIR", help="Where the journal is.", show_default=DATA_DIR_TEXT)
]
#: Rows that are named one by one.
_NAMED = 10

app = typer.Typer(help="Verify, copy, restore or repair the journal of a coordinator.", no_args_is_help=True)


@app.command()
def verify(data_dir: DataDir = None, journal: JournalUrl = None, as_json: AsJson = False) -> None:
    """Read every row of the journal and check it, also while the coordinator runs. Changes nothing."""
    url = _database(journal, data_dir)
    found = upkeep.verify(_directory(data_dir)) if url is None else _postgres().verify(url)
    _tell(found, as_json, f"{found.path} is sound: {_facts(found.facts)}")


@app.command()
def backup(
    target: Annotated[Path, typer.Argument(metavar="FILE", help="The copy; it must not exist yet.")],
    data_dir: DataDir = None,
    journal: JournalUrl = None,
    as_json: AsJson = False,
) -> None:
    """Copy the journal to a file and verify the copy, also while the coordinator runs."""
    url, file = _database(journal, data_dir), _absolute(target)
    found = upkeep.backup(_directory(data_dir), file) if url is None else _postgres().backup(url, file)
    _tell(found, as_json, f"{found.path} holds {_facts(found.facts)}, verified")


@app.command()
def restore(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="A copy made by `journal backup`.")],
    data_dir: DataDir = None,
    journal: JournalUrl = None,
    as_json: AsJson = False,
) -> None:
    """Put a backup in the journal's place. The coordinator must be stopped; the old journal stays beside it.

    With --journal, the database must hold no journal yet.
    """
    url, file = _database(journal, data_dir), _absolute(source)
    found = upkeep.restore(file, _directory(data_dir)) if url is None else _postgres().restore(file, url)
    _tell(found, as_json, f"{found.path} is the backup now: {_facts(found.facts)}; later results are scored again")


@app.command()
def salvage(data_dir: DataDir = None, journal: JournalUrl = None, as_json: AsJson = False) -> None:
    """Make a sound journal of a damaged one: what is lost is scored again. The damaged file stays beside it."""
    if _database(journal, data_dir) is not None:
        raise ConfigError(
            "a journal in PostgreSQL cannot be salvaged in its place; restore the database from its own backups "
            "(pg_dump, archived WAL), or `journal restore FILE` a copy into an empty one"
        )
    made = salvaging.salvage(_directory(data_dir))
    lost = ", ".join(map(str, made.lost[:_NAMED])) + (", ..." if len(made.lost) > _NAMED else "")
    text = f"{made.summary.path} is sound again: {_facts(made.kept)} kept, {len(made.lost)} lost"
    text += f" (rows {lost})" if made.lost else ""
    text += f", {made.dropped} left out that need a lost one" if made.dropped else ""
    _tell(made.summary, as_json, f"{text}; the damaged file is {made.damaged}", lost=made.lost, dropped=made.dropped)


def _tell(found: Summary, as_json: bool, text: str, **more: Any) -> None:
    if as_json:
        print_json({**asdict(found), "path": str(found.path), **more})
        return
    say(text)
    for job in found.jobs:
        say(f"  job {job.job}: {job.state}, {job.shards_done} of {job.shards} shards")


def _facts(count: int) -> str:
    return "1 fact" if count == 1 else f"{count} facts"


def _directory(given: Path | None) -> Path:
    return _absolute(given or default_data_dir())


def _database(journal: str | None, data_dir: Path | None) -> str | None:
    """Return the URL of the journal if it is in a database; raises ``ConfigError`` if a directory is named too."""
    if journal is not None and data_dir is not None:
        raise ConfigError(f"--data-dir names one journal and --journal, or {JOURNAL_VARIABLE}, another; name one")
    return None if journal is None else checked_journal(journal)


def _postgres() -> ModuleType:
    # Only where it is asked for: its driver is an extra.
    from coordinator.journal import postgres_upkeep

    return postgres_upkeep


def _absolute(path: Path) -> Path:
    return path.expanduser().absolute()
