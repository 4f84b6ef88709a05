"""A stand-in of the Hugging Face Hub on this machine: the part of its HTTP interface that a push uses, and no more."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_" + "secret" * 6


class Hub:
    """What the stand-in holds: repositories with branches of files, and what it was asked."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.private: set[str] = set()
        self.commits: list[str] = []
        self.blobs: dict[str, bytes] = {}
        self.log: list[str] = []
        self.failing: dict[str, tuple[int, str]] = {}
        """Part of a request, as in the log → the status it gets, and what is said."""
        self.known: set[str] = set()
        """Models of others."""
        self.endpoint = ""

    def make(self, repo: str, private: bool = False) -> dict[str, bytes]:
        self.repos[repo] = {"main": {".gitattributes": b"*.safetensors filter=lfs\n"}}
        self.private |= {repo} if private else set()
        return self.repos[repo]["main"]

    def uploads(self) -> list[str]:
        return [line for line in self.log if line.startswith("PUT ")]


def _is_large(name: str) -> bool:
    return name.endswith(".safetensors")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        return

    def _answer(self, status: int, value: Any, **headers: str) -> None:
        raw = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Type": "application/json", "Content-Length": str(len(raw)), **headers}.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        self.wfile.write(raw)

    def _handle(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.log.append(f"{self.command} {path}")
        for part, (status, said) in hub.failing.items():
            if part in hub.log[-1]:
                return self._answer(status, {"error": said}, X_Error_Message=said)
        if path.startswith("/lfs/"):  # a signed address of the storage: no token goes there
            assert self.headers.get("Authorization") is None
            hub.blobs[path[5:]] = raw
            assert hashlib.sha256(raw).hexdigest() == path[5:]
            return self._answer(200, {})
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._answer(401, {"error": "Invalid credentials"}, X_Error_Message="Invalid credentials")
        if path == "/api/repos/create":
            return self._create(json.loads(raw))
        if path == "/api/validate-yaml":
            return self._validate(json.loads(raw)["content"])
        if path.endswith(".git/info/lfs/objects/batch"):
            return self._batch(json.loads(raw))
        _, _, _, owner, name, *rest = path.split("/", 6) if path.count("/") >= 6 else [*path.split("/"), ""]
        repo = f"{owner}/{name}"
        if repo in hub.known and not any(rest):
            return self._answer(200, {"id": repo, "private": False, "sha": "0" * 40})
        if repo not in hub.repos:
            return self._answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        what, _, revision = "/".join(rest).partition("/")
        return self._of_repo(repo, what, revision, raw)

    def _of_repo(self, repo: str, what: str, revision: str, raw: bytes) -> None:
        hub = self.hub
        branches = hub.repos[repo]
        if not what:
            return self._answer(200, {"id": repo, "private": repo in hub.private, "sha": "0" * 40})
        if what == "branch":
            if revision in branches:
                return self._answer(409, {"error": "Reference already exists"})
            branches[revision] = dict(branches["main"])
            return self._answer(200, {})
        if revision not in branches:
            return self._answer(404, {"error": "Invalid rev id"}, X_Error_Code="RevisionNotFound")
        files = branches[revision]
        if what == "tree":
            return self._answer(200, [_entry(name, content) for name, content in files.items()])
        if what == "preupload":
            asked = json.loads(raw)["files"]
            modes = [{"path": f["path"], "uploadMode": "lfs" if _is_large(f["path"]) else "regular"} for f in asked]
            return self._answer(200, {"files": [mode | {"shouldIgnore": False} for mode in modes]})
        assert what == "commit"
        for line in map(json.loads, raw.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = hub.blobs[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
            else:
                hub.commits.append(value["summary"])
        oid = f"{len(hub.commits):040x}"
        return self._answer(200, {"commitUrl": f"{hub.endpoint}/{repo}/commit/{oid}", "commitOid": oid})

    def _create(self, asked: dict[str, Any]) -> None:
        repo = f"{asked['organization']}/{asked['name']}"
        if asked["organization"] == "others":
            return self._answer(
                403, {"error": "no rights"}, X_Error_Message="You don't have the rights to create a model"
            )
        if repo in self.hub.repos:
            return self._answer(409, {"error": "exists", "url": f"{self.hub.endpoint}/{repo}"})
        self.hub.make(repo, asked.get("visibility") == "private" or asked.get("private") is True)
        return self._answer(200, {"url": f"{self.hub.endpoint}/{repo}"})

    def _validate(self, content: str) -> None:
        if "license: nonsense" in content:
            return self._answer(400, {"errors": [{"message": '"license" must be one of …'}], "warnings": []})
        told = [] if content.startswith("---") else [{"message": "empty or missing yaml metadata in repo card"}]
        return self._answer(200, {"errors": [], "warnings": told})

    def _batch(self, asked: dict[str, Any]) -> None:
        objects = []
        for one in asked["objects"]:
            action = {"actions": {"upload": {"href": f"{self.hub.endpoint}/lfs/{one['oid']}"}}}
            objects.append(one | ({} if one["oid"] in self.hub.blobs else action))
        return self._answer(200, {"objects": objects, "transfer": "basic"})

    do_GET = do_POST = do_PUT = do_HEAD = _handle


def _entry(name: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(content)}
    entry["oid"] = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    if _is_large(name):
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return entry


@contextlib.contextmanager
def stand_in() -> Iterator[Hub]:
    """A hub on a port of its own, until the block ends."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
