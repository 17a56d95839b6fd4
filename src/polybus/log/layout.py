"""The layout of a data directory, and the lock on it.

DATA/polybus.json                                   format, largest epoch at the last deletion
DATA/unfinished-copy                                a copy was begun and is not complete
DATA/lock                                           held by the process that writes
DATA/cluster.json                                   the Kafka cluster that has the messages, if any
DATA/admin.token                                    the administrator's token, created by the bus
DATA/tls/cert.pem, key.pem                          of `polybus serve --tls-self-signed`
DATA/journal/<first commit>.arrows, .index          the shared journal
DATA/staging/<producer>/<batch>-<unique>.arrows     staged and uncommitted rows of Spark
DATA/accounts/<account>/account.json                password, tokens and grants of an account
                        config-seen.json            which config.toml the bus has used last
DATA/accounts/<account>/topics/<topic>/topic.json   name, epoch, settings
                                       manifest.json  the history's files
                                       history/…      Parquet
                                       table/…        the history as a Delta table, if it is one
DATA/accounts/<account>/tables/<topic>/…            the same, of a topic whose folder has a %
DATA/trash/<epoch>/topic.json                       a deleted topic whose rows the journal still has

A topic's name is that of its folder in the default account, and `account/topic` in any other.
"""

import hashlib
import os
import tempfile
from pathlib import Path

from polybus import names
from polybus.errors import StorageError
from polybus.log.disk import FileLock

FORMAT = 1
SEGMENT_SUFFIX = ".arrows"
INDEX_SUFFIX = ".index"
CONFIG_SEEN = "config-seen.json"
# What a bus and its pipeline keep in DATA, by the name up to its first dot. docs/data-folder.md has
# the files.
OWN = frozenset(
    "polybus unfinished-copy migration lock history cluster run admin tls state journal staging"
    " accounts trash tables pipeline".split()
)
# One of these shows that DATA is a data folder. A lock shows nothing: readers make it, too.
_SIGNS = ("polybus.json", "cluster.json", "unfinished-copy", "migration.json", "state.db")
_SIGN_FOLDERS = ("journal", "accounts", "tables", "pipeline")
# Linux allows 108 bytes with the closing NUL, others 104.
SOCKET_PATH_BYTES_MAX = 100


def is_own(path: Path) -> bool:
    """Whether a file or folder directly in DATA is one of a bus, its temporary files included."""
    return path.name.lstrip(".").partition(".")[0] in OWN


def is_data_folder(data: Path) -> bool:
    """Whether a bus or a pipeline has used the folder."""
    return any((data / name).exists() for name in (*_SIGNS, *_SIGN_FOLDERS))


def is_foreign(data: Path) -> bool:
    """Whether others use the folder: it has folders, and nothing of a bus.

    Files alone (settings, a note) and what every new disk has make no folder foreign.
    """
    if is_data_folder(data):
        return False
    return any(
        path.is_dir() and path.name != "lost+found" and not path.name.startswith(".")
        for path in data.iterdir()
    )


def unfinished_copy_path(data: Path) -> Path:
    return data / "unfinished-copy"


def journal_folder(data: Path) -> Path:
    return data / "journal"


def accounts_folder(data: Path) -> Path:
    return data / "accounts"


def account_folder(data: Path, account: str) -> Path:
    return accounts_folder(data) / account


def topics_folder(data: Path, account: str = names.ACCOUNT) -> Path:
    return account_folder(data, account) / "topics"


def owner_of(data: Path, topic: str) -> str:
    """The account of a topic. A name with a slash may be one of the default account, too."""
    account, slash, _ = topic.partition("/")
    if slash and names.is_account(account) and account_folder(data, account).is_dir():
        return account
    return names.ACCOUNT


def topic_folder(data: Path, topic: str) -> Path:
    account = owner_of(data, topic)
    return topics_folder(data, account) / names.folder_of(names.within(account, topic))


def topic_folders(data: Path) -> list[Path]:
    """The folders of all topics, by account and name."""
    accounts = folders_in(accounts_folder(data))
    return [folder for account in accounts for folder in folders_in(account / "topics")]


def exposed_folder(topic: Path) -> Path:
    """The folder of the Delta table for a topic's folder (log/history/exposed.py).

    delta-rs writes the paths of files as in URLs, where % is an escape, so that other readers do
    not find them. So a topic whose folder has a % has its table beside the topics, with another
    escape.
    """
    if "%" not in topic.name:
        return topic / "table"
    return topic.parents[1] / "tables" / topic.name.replace("%", "~")


def topic_in(folder: Path) -> str:
    """The name of the topic in a folder, as far as the folder's name has it."""
    return names.full(folder.parents[1].name, names.topic_in(folder.name))


def admin_token_path(data: Path) -> Path:
    return data / "admin.token"


def certificate_path(data: Path) -> Path:
    return data / "tls" / "cert.pem"


def private_key_path(data: Path) -> Path:
    return data / "tls" / "key.pem"


def socket_path(wanted: Path) -> Path:
    """The path of a Unix socket, or one in a temporary folder if it is too long for a socket.

    The folder that TMPDIR names may be too long as well.
    """
    digest = hashlib.blake2b(os.fsencode(wanted), digest_size=10).hexdigest()
    name = f"polybus-{os.getuid()}/{digest}.sock"
    paths = (wanted, Path(tempfile.gettempdir(), name), Path("/tmp", name))
    return next(path for path in paths if len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX)


def trash_folder(data: Path) -> Path:
    return data / "trash"


def tombstone_folder(topic_folder: Path, epoch: int) -> Path:
    """Where the tombstone of a folder's topic is after its deletion."""
    return trash_folder(topic_folder.parents[3]) / str(epoch)


def leftovers(data: Path) -> list[Path]:
    """Temporary files of a replacement that a crash interrupted."""
    folders = (data, journal_folder(data), *topic_folders(data))
    return [path for folder in folders for path in sorted(folder.glob("*.tmp"))]


def segment_path(journal: Path, first_commit: int) -> Path:
    return journal / f"{first_commit:020d}{SEGMENT_SUFFIX}"


def index_path(segment: Path) -> Path:
    return segment.with_suffix(INDEX_SUFFIX)


def first_commit_of(segment: Path) -> int:
    return int(segment.stem)


def folders_in(folder: Path) -> list[Path]:
    """The folders in a folder, by name; a missing one has none."""
    try:
        with os.scandir(folder) as found:
            return sorted(Path(entry.path) for entry in found if entry.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def segments(data: Path) -> list[Path]:
    """All segment files of the journal, oldest first.

    Raises OSError if the folder exists and cannot be read.
    """
    return [path for path in _journal_files(data, SEGMENT_SUFFIX) if path.stem.isdigit()]


def orphan_indexes(data: Path) -> list[Path]:
    """Index files of the journal whose segment is missing. Raises OSError, as `segments`."""
    found = _journal_files(data, INDEX_SUFFIX)
    return [path for path in found if not path.with_suffix(SEGMENT_SUFFIX).exists()]


def _journal_files(data: Path, suffix: str) -> list[Path]:
    # Path.glob would take a folder that cannot be read for an empty one.
    folder = journal_folder(data)
    try:
        return sorted(folder / name for name in os.listdir(folder) if name.endswith(suffix))
    except (FileNotFoundError, NotADirectoryError):
        return []


class DataLock(FileLock):
    """The lock on a data directory: one writer, or any number of checkers of a stopped bus."""

    def __init__(self, data: Path, *, shared: bool = False) -> None:
        """Take the lock. Raises StorageError `log.locked` if another process holds it."""
        try:
            super().__init__(data / "lock", shared=shared)
        except BlockingIOError as error:
            text = f"{data} is in use by another process, perhaps a running bus"
            raise StorageError("log.locked", text) from error
