"""The console's files, and how a browser may keep them.

They are served below a path that names the digest of all of them: a new version has new addresses,
so that a browser keeps a file forever and never mixes two versions. The page itself, which names
the digest, is requested each time. Every path of one word is that page too: the script shows the
view with that name. The files have no data of the bus and need no login: the data comes from the
API.
"""

import asyncio
import functools
import gzip
import hashlib
import importlib.resources
from importlib.resources.abc import Traversable
from typing import NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

HOME = "/console/"
# Untrusted messages are shown: only the console's own files may run or style it, no text can become
# HTML (trusted types), and no other page may frame it, which could make a visitor click on it
# unknowingly.
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; font-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "referrer-policy": "no-referrer",
}
MEDIA = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
    "txt": "text/plain",
    "woff2": "font/woff2",
}
PAGE = "index.html"
ASKED_EACH_TIME = "no-cache"
KEPT = "public, max-age=31536000, immutable"


class ConsoleFile(NamedTuple):
    """A file as it is sent."""

    content: bytes
    packed: bytes
    etag: str


def _folder() -> Traversable:
    return importlib.resources.files("polybus.edges.http").joinpath("console")


@functools.cache
def _all_files() -> dict[str, Traversable]:
    """By path: only these files are served, so that no request path can reach another file."""
    found: dict[str, Traversable] = {}
    folders = [("", _folder())]
    while folders:
        prefix, folder = folders.pop()
        for one in folder.iterdir():
            if one.is_dir():
                folders.append((f"{prefix}{one.name}/", one))
            elif one.name.rpartition(".")[2] in MEDIA:
                found[prefix + one.name] = one
    return found


@functools.cache
def digest() -> str:
    """The digest of all files, including their names."""
    hashed = hashlib.sha256()
    for name, file in sorted(_all_files().items()):
        hashed.update(name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return hashed.hexdigest()[:16]


@functools.cache
def read(name: str) -> ConsoleFile:
    """Raises KeyError."""
    content = _all_files()[name].read_bytes()
    if name == PAGE:
        content = content.replace(b"{digest}", digest().encode())
    return ConsoleFile(
        content, gzip.compress(content, mtime=0), f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    )


async def _answer(request: Request, name: str, cached: str) -> Response:
    file = await asyncio.to_thread(read, name)
    headers = {**HEADERS, "etag": file.etag, "cache-control": cached, "vary": "accept-encoding"}
    if file.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    content = file.content
    if "gzip" in request.headers.get("accept-encoding", ""):
        content = file.packed
        headers["content-encoding"] = "gzip"
    return Response(content, headers=headers, media_type=MEDIA[name.rpartition(".")[2]])


async def _serve(request: Request) -> Response:
    first, slash, name = str(request.path_params["path"]).partition("/")
    if not slash and "." not in first:
        return await _answer(request, PAGE, ASKED_EACH_TIME)
    if first == await asyncio.to_thread(digest) and name in _all_files():
        return await _answer(request, name, KEPT)
    raise HTTPException(404, "the console has no such file; load the page again")


async def _home(request: Request) -> Response:
    return RedirectResponse(HOME)


def routes() -> list[Route]:
    return [Route("/", _home), Route("/console", _home), Route(HOME + "{path:path}", _serve)]
