"""Finds what a module uses of PySpark and Spark that is not public, from its syntax tree.

- an import of a module that PySpark's documentation does not list, or of a private name;
- an attribute that begins with an underscore and that no class of ours defines;
- an attribute in camel case that no public class of PySpark has: a method in the JVM;
- a text that names a Java class, or one of the variables and properties that PySpark uses inside.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

PUBLIC_MODULES = (
    *("pyspark", "pyspark.errors", "pyspark.pipelines", "pyspark.sql", "pyspark.sql.datasource"),
    *("pyspark.sql.functions", "pyspark.sql.streaming", "pyspark.sql.streaming.datasource"),
    *("pyspark.sql.streaming.listener", "pyspark.sql.types"),
)
_INTERNAL_TEXT = re.compile(
    r"^(org\.apache\.spark\.|_PYSPARK_|PYSPARK_GATEWAY|SPARK_(REMOTE|CONNECT|LOCAL_REMOTE)"
    r"|(streaming\.sql|sql\.streaming)\.|pyspark-shell|pyspark\.sql\.worker|__globPaths__)"
)
_CAMEL = re.compile(r"^[a-z]+[A-Z]")
# Of the standard library.
_OTHERS = {"getLogger"}


def public_names() -> set[str]:
    """All names of the public modules of PySpark and of the classes in them."""
    found = set(_OTHERS)
    for module in map(importlib.import_module, PUBLIC_MODULES):
        for name in dir(module):
            value = getattr(module, name)
            found.add(name)
            if inspect.isclass(value):
                found |= set(dir(value)) | _made_in_init(value)
    return found


def _made_in_init(kind: type) -> set[str]:
    """The attributes that a class gives its objects: `dataType` of a StructField."""
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):
        return set()
    return set(re.findall(r"\bself\.([a-z]\w*)", source))


class Private:
    """The private names that the modules of a folder use, one finding a line."""

    def __init__(self, folder: Path) -> None:
        self._public = public_names()
        self._trees = {path: ast.parse(path.read_text()) for path in sorted(folder.rglob("*.py"))}
        self._classes: dict[str, list[ast.ClassDef]] = {}
        for tree in self._trees.values():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    self._classes.setdefault(node.name, []).append(node)

    def findings(self) -> Iterator[str]:
        for path, tree in self._trees.items():
            own = _defined(tree)
            for line, found in self._in_tree(tree, own):
                yield f"{path}:{line}: {found}"

    def _in_tree(self, tree: ast.Module, own: set[str]) -> Iterator[tuple[int, str]]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield from ((node.lineno, one) for one in _imports(node))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                if _INTERNAL_TEXT.match(node.value):
                    yield node.lineno, repr(node.value)
            elif isinstance(node, ast.ClassDef):
                yield from self._in_class(node)
            elif isinstance(node, ast.Attribute) and _of(node) not in ("self", "cls", "os"):
                if self._is_private(node.attr, own) or _is_class_set(node):
                    yield node.lineno, f".{node.attr}"
            elif isinstance(node, ast.Call) and _of_getattr(node, own):
                yield node.lineno, ast.unparse(node)

    def _is_private(self, name: str, own: set[str]) -> bool:
        is_hidden = name.startswith("_") and not name.startswith("__")
        is_java = bool(_CAMEL.match(name)) and name not in self._public
        return (is_hidden or is_java) and name not in own

    def _in_class(self, node: ast.ClassDef) -> Iterator[tuple[int, str]]:
        """What a class takes from a base class that is not ours."""
        own = self._members(node.name)
        for inner in ast.walk(node):
            if isinstance(inner, ast.Attribute) and _of(inner) in ("self", "cls"):
                if inner.attr.startswith("_") and not inner.attr.startswith("__"):
                    if inner.attr not in own:
                        yield inner.lineno, f"self.{inner.attr} of {node.name}"

    def _members(self, name: str) -> set[str]:
        found: set[str] = set()
        for node in self._classes.get(name, []):
            found |= _defined(node)
            for base in node.bases:
                base_name = base.value if isinstance(base, ast.Subscript) else base
                if isinstance(base_name, ast.Name) and base_name.id != name:
                    found |= self._members(base_name.id)
        return found


def _imports(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    modules = [one.name for one in node.names] if isinstance(node, ast.Import) else [node.module]
    for module in modules:
        root = (module or "").partition(".")[0]
        is_public = module in PUBLIC_MODULES and not any(
            one.name.startswith("_") for one in node.names
        )
        if root in ("pyspark", "py4j") and not is_public:
            yield f"import of {module}"


def _of(node: ast.Attribute) -> str:
    return node.value.id if isinstance(node.value, ast.Name) else ""


def _is_class_set(node: ast.Attribute) -> bool:
    """`x.__class__ = …`, but not that of a module of ours."""
    is_module = isinstance(node.value, ast.Subscript)
    return node.attr == "__class__" and isinstance(node.ctx, ast.Store) and not is_module


def _of_getattr(node: ast.Call, own: set[str]) -> bool:
    """`getattr(x, "_name")`."""
    is_getattr = isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr")
    if not is_getattr or len(node.args) < 2 or not isinstance(node.args[1], ast.Constant):
        return False
    name = str(node.args[1].value)
    return name.startswith("_") and not name.startswith("__") and name not in own


def _defined(tree: ast.AST) -> set[str]:
    """Functions, classes, variables and attributes that a tree defines."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found
