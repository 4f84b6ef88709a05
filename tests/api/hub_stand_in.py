"""A stand-in of the Hugging Face Hub on this machine: the part of its HTTP interface that a push, or reading by ranges,
uses, and no more."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from ..http_stand_in import serving

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
        self.given: Counter[str] = Counter()
        """Bytes of each file that were given out."""
        self.whole: list[str] = []
        """Files that were asked for without a range."""
        self.ignores_ranges = False

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
        if "/resolve/" in path:
            return self._resolve(path)
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
        if what == "revision":
            sha = "0" * 40 if revision in (*branches, "0" * 40) else None
            gone = {"error": "Invalid rev id"}
            return self._answer(200, {"id": repo, "sha": sha}) if sha else self._answer(404, gone)
        revision, _, folder = revision.partition("/")
        revision = "main" if revision == "0" * 40 else revision
        if revision not in branches:
            return self._answer(404, {"error": "Invalid rev id"}, X_Error_Code="RevisionNotFound")
        files = branches[revision]
        if what == "tree":
            if "recursive=true" in self.path.lower():
                return self._answer(200, [_entry(name, content) for name, content in files.items()])
            return self._answer(200, _level(files, f"{folder}/" if folder else ""))
        if what == "paths-info":
            asked = parse_qs(raw.decode()).get("paths", []) if b"paths=" in raw else json.loads(raw)["paths"]
            return self._answer(200, [_entry(name, files[name]) for name in asked if name in files])
        if what == "preupload":
            asked = json.loads(raw)["files"]
            modes: list[dict[str, Any]] = [
                {"path": f["path"], "uploadMode": "lfs" if _is_large(f["path"]) else "regular", "shouldIgnore": False}
                for f in asked
            ]
            for mode in modes:
                if mode["path"] in files:
                    entry = _entry(mode["path"], files[mode["path"]])
                    mode["oid"] = entry.get("lfs", entry)["oid"]
            return self._answer(200, {"files": modes})
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

    def _resolve(self, path: str) -> None:
        repo, _, rest = path[1:].partition("/resolve/")
        revision, _, name = rest.partition("/")
        content = self.hub.repos.get(repo, {}).get("main" if revision == "0" * 40 else revision, {}).get(name)
        if content is None:
            return self._answer(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound")
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        part = content
        if found and not self.hub.ignores_ranges:
            part = content[int(found[1]) : int(found[2]) + 1]
        elif self.command == "GET":
            self.hub.whole.append(name)
        self.send_response(206 if part is not content else 200)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.end_headers()
        if self.command == "GET":
            self.hub.given[name] += len(part)
            self.wfile.write(part)
        return None

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


def _level(files: dict[str, bytes], prefix: str) -> list[dict[str, Any]]:
    """What lies in one folder of a repository: its files, and its folders by their names."""
    below = {name: content for name, content in files.items() if name.startswith(prefix)}
    folders = {name.removeprefix(prefix).partition("/")[0] for name in below if "/" in name.removeprefix(prefix)}
    found = [{"type": "directory", "path": prefix + name, "oid": "0" * 40, "size": 0} for name in sorted(folders)]
    return found + [_entry(name, content) for name, content in below.items() if "/" not in name.removeprefix(prefix)]


@contextlib.contextmanager
def stand_in() -> Iterator[Hub]:
    """A hub on a port of its own, until the block ends."""
    hub = Hub()
    with serving(_Handler, hub=hub) as address:
        hub.endpoint = f"http://{address}"
        yield hub
