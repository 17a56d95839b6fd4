"""The source keeps the house style: sizes, names, imports, and no module without a test.

Each test looks at every file and names all offenders at once.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import conftest
from trees_kit import nodes, parsed
from trees_kit import trees as trees

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "polybus"
TESTS = ROOT / "tests"
MODULE_LINES_MAX = 600
FUNCTION_LINES_MAX = 60

MODULES = sorted(SOURCE.rglob("*.py"))
EVERYTHING = [*MODULES, *sorted(TESTS.rglob("*.py"))]

# `message` is what goMS calls its event and what the public client API calls a message.
SHARED_NAMES = {"Message"}


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def report(offenders: list[str]) -> str:
    return "\n" + "\n".join(offenders)


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULE_FILES = {module_name(path): path for path in MODULES}
COMPILED_IMPORT = re.compile(r"^from (polybus[\w.]*) c?import\b", re.MULTILINE)


# Sizes and comments


def test_a_module_can_be_read_in_one_sitting() -> None:
    sizes = {path: len(path.read_text().splitlines()) for path in EVERYTHING}
    long = [
        f"{shown(path)} has {size} lines, at most {MODULE_LINES_MAX} are allowed"
        for path, size in sizes.items()
        if size > MODULE_LINES_MAX
    ]
    assert not long, report(long)


def test_a_function_fits_on_a_screen() -> None:
    long = [
        f"{shown(path)}:{node.lineno} {node.name} has {node.end_lineno - node.lineno + 1} lines,"
        f" at most {FUNCTION_LINES_MAX} are allowed"
        for path in EVERYTHING
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > FUNCTION_LINES_MAX
    ]
    assert not long, report(long)


def test_open_work_is_an_issue_and_not_a_comment() -> None:
    marked = [
        f"{shown(path)}:{number} {line.strip()}"
        for path in EVERYTHING
        if path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"\b(TODO|FIXME|XXX)\b", line)
    ]
    assert not marked, report(marked)


def test_a_module_begins_with_a_docstring() -> None:
    silent = [shown(path) for path in MODULES if not ast.get_docstring(parsed(path))]
    assert not silent, report(silent)


def is_known(name: str) -> bool:
    """Whether a dotted name is a module, or something that a module has."""
    module, rest = name, ""
    while module not in MODULE_FILES:
        module, _, rest = module.rpartition(".")
    return not rest or re.search(rf"\b{rest}\b", MODULE_FILES[module].read_text()) is not None


def test_docstrings_name_modules_that_exist() -> None:
    """As `polybus.scan.batch` or as log/files.py."""
    packages = {path.name for path in SOURCE.iterdir() if path.is_dir()}
    unknown = []
    for path in MODULES:
        for node in nodes(path):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                continue
            text = ast.get_docstring(node) or ""
            dotted = re.findall(r"(?<![\w./@-])(polybus(?:\.\w+)+)", text)
            named = [name for name in dotted if f"polybus.{name.split('.')[1]}" in MODULE_FILES]
            files = re.findall(r"(?<![\w./<-])((?:\w+/)+\w+\.py)\b", text)
            missing = [name for name in named if not is_known(name)]
            missing += [
                file
                for file in files
                if file.split("/")[0] in packages and not (SOURCE / file).exists()
            ]
            unknown += [f"{shown(path)} names {name}" for name in missing]
    assert not unknown, report(unknown)


# Words

# Phrases that a reader cannot map to what they know, each with the standard words. They are regular
# expressions in lower case. A phrase may continue on the next line.
UNIDIOMATIC = {
    r"so many": "this many, or name the number",
    r"(?<!there )(is|are) none of": "is not one of, are not among",
    r"(?<!there )(is|are|was|were)( then)? no (?!longer|more|one|such|reason)": "is not a",
    r"(?<!there )(is|are|was) none": "is not one, is empty",
    r"may be no": "may not be a",
    r"has not (all|any|its|the)": "does not have",
    r"for ever": "forever",
    r"anew": "again",
    r"(could|would) else": "otherwise … could, would",
    r"nothing tells": "it is unknown",
    r"nobody can tell": "it cannot be detected",
    r"(does|do) not tell": "does not say, is unknown",
    r"(is|are|was|were|been|be) told(?! apart)": "is notified, is reported",
    r"told apart|tells? (\S+ ){1,4}apart": "distinguished, distinguishes",
    r"hears? (\S+ )?of": "is notified of",
    r"goe?s? on": "continues",
    r"mend(s|ed)?": "repair, fix",
    r"(may|can) (be|have been) [a-z]+ed or not": "may or may not be",
    r"in no file": "missing",
    r"(begin|call)(s|ed)? so": "begins with this, by this name",
    r"ended by itself": "exited unexpectedly",
    r"askers?": "caller, user",
    r"(for|to) who": "for those who, for whom",
    r"(is|be) another's": "belongs to another account",
    r"whichever moment": "at any time",
    r"some day": "later, eventually",
    r"twice the same": "idempotent",
    r"the eyes of": "the rights of",
    r"(runs?|waits?|exists?|arrives?) already": "is already running, already exists",
    r"br(oke|eaks?|oken|eaking) off": "was interrupted",
    r"one behind the other": "one after the other",
    r"lets? go of": "releases",
    r"(un)?harm(s|ed|ing)": "corrupts, damages",
    r"nurser(y|ies)|zygotes?": "fork server, process that forks",
    r"good for nothing": "useless",
    r"hand(s|ed|ing)? on": "passes on",
    r"(is|are) there already|already there": "already exists",
    r"so long": "as long, for this time",
    r"has still to": "has yet to",
    r"held against": "checked against, compared with",
    r"behind (the last|its padding|what)": "after",
    r"broke its protocol": "violated its protocol",
    r"(is|was|are|were) (still )?ending": "is stopping",
    r"than it may": "than allowed",
}
# A string with its prefix, or a comment.
PROSE = re.compile(r'([a-zA-Z]*)("""(?:\\.|[^\\])*?"""|"(?:\\.|[^"\\\n])*")|#[^\n]*', re.DOTALL)


def prose(path: Path) -> str:
    """A document; of Python its strings and comments, as they are read: one after the other."""
    text = path.read_text()
    if path.suffix not in (".md", ".js"):
        parts, end = [], 0
        for match in PROSE.finditer(text):
            is_joined = not text[end : match.start()].strip()
            parts.append(" " if is_joined else " | ")
            parts.append("" if "b" in (match[1] or "") else (match[2] or match[0]).strip('"# '))
            end = match.end()
        text = "".join(parts)
    # Python's None is not a word.
    return re.sub(r"\s+", " ", text).replace("None", "null").lower()


def test_the_prose_has_standard_words() -> None:
    """Error texts, help, docstrings, comments and documents."""
    texts = [*EVERYTHING, *sorted(SOURCE.rglob("*.p[xy][dx]"))]
    texts += sorted((ROOT / "docs").rglob("*.md"))
    texts += [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
    texts += sorted((SOURCE / "edges" / "http" / "console").rglob("*.js"))
    phrases = re.compile(rf"\b(?:{'|'.join(UNIDIOMATIC)})\b")
    found = []
    for path in texts:
        if path == Path(__file__):
            continue
        text = prose(path)
        for match in phrases.finditer(text):
            context = text[max(0, match.start() - 30) : match.end() + 20]
            words = next(
                words
                for phrase, words in UNIDIOMATIC.items()
                if re.match(rf"(?:{phrase})\b", text[match.start() :])
            )
            found.append(f"{shown(path)}: …{context}…: write {words!r}")
    assert not found, report(found)


# Tests of every module


@functools.cache
def imported_names(path: Path) -> frozenset[str]:
    """Every module that a file may import: `from a import b` counts as a and as a.b."""
    names: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # Some modules are named in a string and imported on use.
            names.add(node.value)
    return frozenset(names)


@functools.cache
def imported_by_tests() -> frozenset[str]:
    return frozenset().union(*(imported_names(path) for path in TESTS.rglob("*.py")))


def reached_by_tests() -> set[str]:
    """The modules that tests import, directly or through other modules."""
    reached: set[str] = set()
    fresh = set(imported_by_tests() & set(MODULE_FILES))
    while fresh:
        reached |= fresh
        found = {name for module in fresh for name in imported_names(MODULE_FILES[module])}
        # Importing a.b.c runs a.b too.
        found |= {name.rpartition(".")[0] for name in found | fresh}
        fresh = (found & set(MODULE_FILES)) - reached
    return reached


def test_no_module_is_dead() -> None:
    """A module that no test reaches, not even through other modules, can go."""
    reached = reached_by_tests()
    dead = [
        shown(path)
        for name, path in MODULE_FILES.items()
        if name not in reached and path.name != "__main__.py"
    ]
    assert not dead, report(dead)


def test_every_package_has_tests_of_its_own() -> None:
    packages = {module_name(path.parent / "__init__.py") for path in MODULES}
    untested = [
        name
        for name in sorted(packages)
        if not any(f"{one}.".startswith(f"{name}.") for one in imported_by_tests())
    ]
    assert not untested, report(untested)


def test_the_files_that_are_slow_or_long_exist() -> None:
    files = {path.name for path in TESTS.rglob("test_*.py")}
    assert sorted({*conftest.SLOW_FILES, *conftest.LONG_FILES} - files) == []


# Imports


def imports_of(name: str) -> set[str]:
    """The modules of the package that a module imports anywhere in its file."""
    path = MODULE_FILES[name]
    found: set[str] = set()
    for statement in nodes(path):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            base = statement.module or ""
            if statement.level:
                parts = name.split(".")
                kept = len(parts) - statement.level + (path.name == "__init__.py")
                base = ".".join([*parts[:kept], *filter(None, [statement.module])])
            for alias in statement.names:
                whole = f"{base}.{alias.name}"
                found.add(whole if whole in MODULE_FILES else base)
    return (found & set(MODULE_FILES)) - {name}


def compiled_imports() -> dict[str, set[str]]:
    """By module: what its C types, or its Cython source, import of the package."""
    found: dict[str, set[str]] = {}
    for path in sorted(SOURCE.rglob("*.p[xy][dx]")):
        name = module_name(path)
        imported = {one for one in COMPILED_IMPORT.findall(path.read_text()) if one != name}
        found[name] = found.get(name, set()) | imported
    return found


def cycles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The largest sets of names that all reach each other."""
    reachable: dict[str, set[str]] = {}
    for name in graph:
        seen: set[str] = set()
        fresh = set(graph[name])
        while fresh:
            seen |= fresh
            fresh = {other for one in fresh for other in graph[one]} - seen
        reachable[name] = seen
    knots = {
        frozenset(other for other in reachable[name] if name in reachable[other])
        for name in graph
        if name in reachable[name]
    }
    return sorted((set(knot) for knot in knots), key=sorted)


def test_a_cycle_is_found_with_all_its_modules() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert cycles(graph) == [{"b", "c"}, {"d", "e"}]


def levels(graph: dict[str, set[str]], packages: set[str]) -> dict[str, dict[str, set[str]]]:
    """By package: which of its modules and packages import which others beside them.

    What a package's own file imports, and who imports that, is `__init__` among its modules.
    """
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name, imported in graph.items():
        for other in imported:
            paths = [f"{one}.__init__" if one in packages else one for one in (name, other)]
            parts, others = (path.split(".") for path in paths)
            depth = next(n for n in range(len(parts)) if parts[n] != others[n])
            level = found[".".join(parts[:depth])]
            level[parts[depth]].add(others[depth])
            level[others[depth]]  # One that imports nothing is in the graph, too.
    return found


def test_a_level_has_what_its_packages_import_of_each_other() -> None:
    graph = {"p.a.x": {"p.b.y", "p.a.z"}, "p.b.w": {"p.a"}, "p.a": {"p.a.x"}}
    found = levels(graph, {"p", "p.a", "p.b"})
    assert found["p"] == {"a": {"b"}, "b": {"a"}}
    assert found["p.a"] == {"x": {"z"}, "z": set(), "__init__": {"x"}}


def test_no_modules_or_packages_import_each_other() -> None:
    """Folders are layers: at every level of the tree, imports point in one direction.

    Imports in functions, under TYPE_CHECKING and of C types count. So modules form no cycle
    either.
    """
    graph = {name: imports_of(name) for name in MODULE_FILES}
    compiled = compiled_imports()
    assert "polybus.scan.batch" in compiled["polybus.edges.tcp.handling"]
    for name, imported in compiled.items():
        graph[name] = graph.get(name, set()) | imported
    for name in set().union(*graph.values()):
        graph.setdefault(name, set())
    packages = {name for name, path in MODULE_FILES.items() if path.name == "__init__.py"}
    knots = [
        f"{package}: {', '.join(sorted(knot))}"
        for package, level in levels(graph, packages).items()
        for knot in cycles(level)
    ]
    assert not knots, report(knots)


def test_services_open_no_connection() -> None:
    """The import check does not see the streams of asyncio."""
    opens = ("_connection", "_server", "_endpoint")
    found = [
        f"{shown(path)}:{node.lineno}: {node.attr}"
        for path in MODULES
        if path.is_relative_to(SOURCE / "services")
        for node in nodes(path)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith(("open_", "start_", "create_", "connect_"))
        and node.attr.endswith(opens)
    ]
    assert not found, report(found)


# Owners


def stored_attributes(node: ast.AST) -> list[ast.Attribute]:
    """The attributes that a statement assigns, deletes, or assigns or deletes an item of."""
    stored = []
    for one in ast.walk(node):
        if isinstance(one, ast.Subscript) and not isinstance(one.ctx, ast.Load):
            one = one.value
        elif not isinstance(one, ast.Attribute) or isinstance(one.ctx, ast.Load):
            continue
        if isinstance(one, ast.Attribute):
            stored.append(one)
    return stored


def is_own(attribute: ast.Attribute) -> bool:
    return isinstance(attribute.value, ast.Name) and attribute.value.id == "self"


def fields_of(definition: ast.ClassDef) -> set[str]:
    """What a class declares in its body or assigns in its methods."""
    declared = {
        one.target.id
        for one in definition.body
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    }
    return declared | {one.attr for one in stored_attributes(definition) if is_own(one)}


def test_only_its_own_module_writes_a_field_of_a_session() -> None:
    """The same holds for what sessions are made of: feeds, follows and contents."""
    states = ("Session", "PackSequence", "Content", "Entries", "Feed", "Feeds", "Follow")
    owners: dict[str, set[str]] = defaultdict(set)
    for path in sorted((SOURCE / "services" / "sessions").glob("*.py")):
        for node in nodes(path):
            if isinstance(node, ast.ClassDef) and node.name in states:
                for field in fields_of(node):
                    owners[field].add(shown(path))
    # A session counts itself among the holders of a direct pack.
    owners["holders"] = {"src/polybus/services/sessions/sequence.py"}
    users = [
        path
        for path in MODULES
        if any(name.startswith("polybus.services.sessions.") for name in imported_names(path))
        or path.parent.name == "sessions"
    ]
    foreign = [
        f"{shown(path)}:{stored.lineno} writes {ast.unparse(stored)}"
        for path in users
        for stored in stored_attributes(parsed(path))
        if stored.attr in owners and not is_own(stored) and shown(path) not in owners[stored.attr]
    ]
    assert not foreign, report(foreign)


# Names


def may_share_names(places: list[str]) -> bool:
    """Twins that a name belongs to: a compiled scanner's, or each protocol's events."""
    return all(re.match(r"polybus\.(scan|wire)\.", place) for place in places)


def test_whoever_expects_bad_json_expects_bad_text() -> None:
    """msgspec raises UnicodeDecodeError, which is no DecodeError, for bytes that are not UTF-8."""
    offenders = []
    for path in MODULES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ExceptHandler) and node.type is not None:
                caught = ast.unparse(node.type)
                if "msgspec.DecodeError" in caught:
                    if "UnicodeDecodeError" not in caught and "ValueError" not in caught:
                        offenders.append(f"{shown(path)}:{node.lineno}: except {caught}")
    assert not offenders, report(offenders)


def test_types_are_decoded_by_way_of_structs() -> None:
    """What msgspec does at the first use of a Struct ends the process if two threads do it."""
    offenders = []
    for path in MODULES:
        if path.name == "structs.py":
            continue
        at_top = {id(one) for node in parsed(path).body for one in _outside_functions(node)}
        for node in nodes(path):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                is_typed = "type" in {one.arg for one in node.keywords} or len(node.args) > 1
                is_bad = called == "msgspec.convert"
                is_bad |= bool(re.fullmatch(r"msgspec\.\w+\.decode", called)) and is_typed
                is_bad |= called.endswith(".Decoder") and id(node) not in at_top
                offenders += [f"{shown(path)}:{node.lineno} {called}"] * is_bad
    assert not offenders, report(offenders)


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        yield node
        for child in ast.iter_child_nodes(node):
            yield from _outside_functions(child)


def type_names(path: Path) -> list[str]:
    """The classes of a module and its type aliases: capitalised names at its top level."""
    names = [node.name for node in nodes(path) if isinstance(node, ast.ClassDef)]
    for node in parsed(path).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names += [one.id for one in targets if isinstance(one, ast.Name)]
    return [name for name in names if re.match(r"_?[A-Z]\w*[a-z]", name)]


# Words with several meanings: alone, as the name of a type, they belong to one module or to none.
WORD_OWNERS = {
    "Batch": "polybus.scan.batch",
    "Position": "polybus.wire.positions",
    **dict.fromkeys(("Flow", "Place", "Plan", "State", "Verb", "Where")),
}


def test_a_word_with_several_meanings_does_not_name_a_type() -> None:
    """A name says which one it is: `FlowRun`, `CursorState`, `PeerRequest`."""
    bare = [
        f"{module}: {name}"
        for module, path in MODULE_FILES.items()
        for name in type_names(path)
        if (word := name.lstrip("_")) in WORD_OWNERS and WORD_OWNERS[word] != module
    ]
    assert not bare, report(bare)


def test_the_name_of_a_type_has_one_meaning() -> None:
    """No class or type alias has the same name in two modules of the package."""
    places: dict[str, list[str]] = defaultdict(list)
    for module, path in MODULE_FILES.items():
        for name in type_names(path):
            places[name].append(module)
    shared = [
        f"{name}: {', '.join(found)}"
        for name, found in sorted(places.items())
        if len(found) > 1 and not may_share_names(found) and name not in SHARED_NAMES
    ]
    assert not shared, report(shared)
