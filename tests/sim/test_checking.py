"""`verify` finds damage beside the log: of accounts, of lake tables, of the tables of topics."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import topics_kit
from click.testing import CliRunner

from polybus.cli.backup import backup
from polybus.cli.restore import restore
from polybus.cli.verify import verify as verify_command
from polybus.errors import StorageError, UsageError
from polybus.lake.compact import checkpoint
from polybus.lake.table import open_table
from polybus.log import checked_json
from polybus.log.copying import CopiedEpochs, CopyMetadata
from polybus.log.history import exposed
from polybus.services.accounts.store import AccountStore
from polybus.services.checking import verify

LOG = "_delta_log"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two accounts, a table with a checkpoint and one without, and two exposed topics."""
    data = tmp_path_factory.mktemp("whole") / "data"
    for topic in ("news", "a b"):
        topics_kit.make_topic(data, topic)
        exposed.expose(data, topic)
    store = AccountStore(data)
    store.create("shop", "hash", [])
    store.set_password("default", "hash")
    for name, batches in (("silver", 4), ("a%b", 2)):
        table = open_table(data, name)
        for batch in range(batches):
            table.append(pa.table({"offset": [batch]}), writer="w", batch_id=batch)
    checkpoint(open_table(data, "silver"))
    open_table(data, "silver").append(pa.table({"offset": [9]}), writer="w", batch_id=9)
    assert verify(data).intact
    return data


@pytest.fixture
def data(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "data")
    return tmp_path / "data"


@pytest.mark.parametrize("corrupt", [flip, cut, Path.unlink])
def test_an_account_that_nobody_can_log_in_to_is_damage_in_every_copy(
    corrupt: Callable[[Path], object], data: Path
) -> None:
    path = data / "accounts" / "shop" / "account.json"
    corrupt(path)
    (damage,) = verify(data).damages
    assert damage.file == str(path) and str(path) not in damage.reason
    ended = CliRunner().invoke(verify_command, ["--data", str(data)])
    assert ended.exit_code == 1 and "account.json" in ended.output
    copy, new = data.with_name("copy"), data.with_name("new")
    ended = CliRunner().invoke(backup, [str(copy), "--data", str(data)])
    assert ended.exit_code == 1 and "account.json" in ended.output
    ended = CliRunner().invoke(restore, [str(copy), "--data", str(new)])
    assert ended.exit_code == 1 and "account.json" in ended.output
    assert not new.exists()


@pytest.mark.parametrize("corrupt", [flip, cut, Path.unlink])
def test_the_file_of_the_default_account_is_checked(
    corrupt: Callable[[Path], object], data: Path
) -> None:
    path = data / "accounts" / "default" / "account.json"
    corrupt(path)
    assert [one.file for one in verify(data).damages] == [str(path)]
    store = AccountStore(data)
    assert store.damaged.keys() == {"default"}
    with pytest.raises(UsageError, match=r"account\.damaged"):
        store.set_password("default", "other")


def test_the_default_account_needs_no_file(data: Path) -> None:
    folder = data / "accounts" / "default"
    (folder / "account.exists").unlink()
    assert verify(data).intact
    AccountStore(data).set_password("default", "other")
    assert (folder / "account.exists").exists()
    for name in ("account.json", "account.exists"):
        (folder / name).unlink()
    assert verify(data).intact and AccountStore(data).damaged == {}


@pytest.mark.parametrize("corrupt", [cut, Path.unlink])
@pytest.mark.parametrize("table", ["silver", "a~25b"])
def test_a_file_that_a_table_names_is_there_with_its_size(
    table: str, corrupt: Callable[[Path], object], data: Path
) -> None:
    for path in sorted((data / "tables" / table).glob("*.parquet")):
        kept = path.read_bytes()
        corrupt(path)
        assert [one.file for one in verify(data).damages] == [str(path)]
        path.write_bytes(kept)
    assert verify(data).intact


@pytest.mark.parametrize("name", ["news", "a b"])
def test_a_file_that_the_table_of_a_topic_names_is_there(name: str, data: Path) -> None:
    folder = data / "accounts" / "default"
    table = folder / "topics/news/table" if name == "news" else folder / "tables/a~20b"
    # The copy has no hard links, so the history of the topic is not touched.
    path = table / sorted(exposed.read_table(table).paths)[0]
    path.unlink()
    (damage,) = verify(data).damages
    assert (damage.file, damage.topic) == (str(path), name)
    # A restored topic is exposed, and has no table before the next hand-over.
    shutil.rmtree(table)
    assert verify(data).intact


def test_every_version_of_a_table_can_be_read_or_is_named(data: Path) -> None:
    for path in sorted((data / "tables" / "silver" / LOG).iterdir()):
        if path.name == "_last_checkpoint":
            continue
        kept = path.read_bytes()
        for corrupted in (b"", kept[:-2], b"\0" * len(kept)):
            path.write_bytes(corrupted)
            assert [one.file for one in verify(data).damages] == [str(path)], corrupted
        path.write_bytes(kept)
    path = data / "tables" / "a~25b" / LOG / f"{0:020d}.json"
    path.unlink()
    assert [one.file for one in verify(data).damages] == [str(path)]


@pytest.mark.parametrize(
    "table", ["tables/silver", "tables/a~25b", "accounts/default/tables/a~20b"]
)
def test_a_lost_last_version_and_a_lost_log_are_named(table: str, data: Path) -> None:
    log = data / table / LOG
    versions = sorted(path for path in log.iterdir() if path.stem.isdigit())
    versions[-1].unlink()
    report = verify(data)
    assert [one.file for one in report.damages] == [str(versions[-1])]
    shutil.rmtree(log)
    assert str(versions[-1]) in {one.file for one in verify(data).damages}
    # It is a witness, and nothing depends on it.
    (data / table / "_newest").write_bytes(b"{")
    verify(data)


def test_files_that_no_version_names_are_noted(data: Path) -> None:
    assert not any("no version names it" in note for note in verify(data).notes)
    path = data / "tables" / "silver" / "more.parquet"
    shutil.copy(sorted(path.parent.glob("*.parquet"))[0], path)
    report = verify(data)
    assert report.intact and [note for note in report.notes if str(path) in note]


def test_a_flip_in_the_rows_of_a_table_is_named(data: Path) -> None:
    for path in sorted((data / "tables").glob("*/*.parquet")):
        kept = path.read_bytes()
        # The first page: behind the magic number.
        path.write_bytes(kept[:30] + bytes([kept[30] ^ 1]) + kept[31:])
        assert [one.file for one in verify(data).damages] == [str(path)]
        path.write_bytes(kept)
    assert verify(data).intact


def test_a_flip_anywhere_in_a_checkpoint_or_file_of_a_table_is_named(data: Path) -> None:
    table = data / "tables" / "silver"
    paths = [table / LOG / f"{3:020d}.checkpoint.parquet", next(table.glob("*.parquet"))]
    for path in paths:
        kept = path.read_bytes()
        for at in range(0, len(kept), 211):
            path.write_bytes(kept[:at] + bytes([kept[at] ^ 1]) + kept[at + 1 :])
            assert [one.file for one in verify(data).damages] == [str(path)], at
        if path.parent.name == LOG:
            with pytest.raises(StorageError, match=r"lake\.damaged.*its checksum is wrong"):
                _ = open_table(data, "silver").version
        path.write_bytes(kept)
    paths[0].unlink()
    assert [one.file for one in verify(data).damages] == [str(paths[0])]
    (table / LOG / "_last_checkpoint").unlink()
    assert verify(data).intact and open_table(data, "silver").rows == 5


@pytest.mark.parametrize("name", ["cluster.json", "migration.json"])
def test_a_damaged_note_of_a_cluster_is_named(name: str, data: Path) -> None:
    path = data / name
    path.write_bytes(checked_json.encode(CopyMetadata({"news": CopiedEpochs(1, 2)})))
    assert verify(data).intact
    flip(path)
    assert [one.file for one in verify(data).damages] == [str(path)]


def test_what_others_may_leave_in_a_table_is_no_damage(data: Path) -> None:
    log = data / "tables" / "silver" / LOG
    # Parts of a checkpoint, which other libraries write.
    (log / f"{3:020d}.checkpoint.parquet").rename(
        log / f"{3:020d}.checkpoint.0000000001.0000000002.parquet"
    )
    for version in range(4):
        (log / f"{version:020d}.json").unlink()
    # A first commit that was interrupted, and a table of an earlier version.
    (data / "tables" / "new").mkdir()
    (data / "tables" / "new" / "rows.parquet").write_bytes(b"PAR1")
    (data / "tables" / "old" / "_polybus").mkdir(parents=True)
    report = verify(data)
    assert report.intact, report.damages
    assert any("tables/old" in note for note in report.notes)


def test_a_flip_that_leaves_a_version_valid_is_found_too(data: Path) -> None:
    for table, name in (("silver", f"{4:020d}.json"), ("a~25b", f"{1:020d}.json")):
        path = data / "tables" / table / LOG / name
        kept = path.read_bytes()
        assert b'"version": ' in kept, "the last batch of its writer"
        path.write_bytes(kept.replace(b'"version": ', b'"version": 1'))
        assert [one.file for one in verify(data).damages] == [str(path)]
        with pytest.raises(StorageError, match=r"lake\.damaged.*its checksum is wrong"):
            _ = open_table(data, table.replace("~25", "%")).version
        path.write_bytes(kept)
    assert verify(data).intact


def test_a_version_of_another_library_has_no_checksum_and_is_read(data: Path) -> None:
    path = data / "tables" / "a~25b" / LOG / f"{1:020d}.json"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([b'{"commitInfo": {"operation": "WRITE"}}\n', *lines[1:]]))
    assert verify(data).intact
    assert open_table(data, "a%b").rows == 2
