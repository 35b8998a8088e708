"""A Hub of one process: as much of its HTTP interface as creating, committing to and reading a repository needs."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Handler(BaseHTTPRequestHandler):
    """Repositories are dicts of file contents on the server."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def reply(self, status: int, body: bytes = b"", **headers: str):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "X-Repo-Commit": COMMIT, **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def reply_json(self, value: object):
        self.reply(200, json.dumps(value).encode(), Content_Type="application/json")

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            body = b"".join(self.chunks())
        repositories = self.server.repositories
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked['organization']}/{asked['name']}"
            repositories.setdefault(repo, {})
            return self.reply_json({"url": f"{self.server.url}/{repo}", "id": repo})
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/main", self.path):
            paths = [file["path"] for file in json.loads(body)["files"]]
            answer = {"uploadMode": "regular", "shouldIgnore": False}  # no separate storage for large files
            return self.reply_json({"files": [{"path": path, **answer} for path in paths]})
        if self.path == "/api/validate-yaml":
            return self.reply_json({"errors": [], "warnings": []})
        if match := re.match(r"/api/models/([^/]+/[^/]+)/commit/main", self.path):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    repositories[match.group(1)][line["value"]["path"]] = content
            url = f"{self.server.url}/{match.group(1)}/commit/{COMMIT}"
            return self.reply_json({"success": True, "commitOid": COMMIT, "commitUrl": url})
        return self.reply(404)

    def chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def do_GET(self):
        path = self.path.partition("?")[0]
        repositories = self.server.repositories
        if match := re.match(r"/api/models/([^/]+/[^/]+?)(/revision/[^/]+|/tree/.*)?$", path):
            if match.group(1) not in repositories:
                return self.reply(404, X_Error_Code="RepoNotFound")
            names = sorted(repositories[match.group(1)])
            if (match.group(2) or "").startswith("/tree"):
                return self.reply_json([])
            return self.reply_json(
                {"id": match.group(1), "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}
            )
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            if match.group(1) not in repositories:
                return self.reply(404, X_Error_Code="RepoNotFound")
            content = repositories[match.group(1)].get(match.group(2))
            if content is None:
                return self.reply(404, X_Error_Code="EntryNotFound")
            return self.reply(200, content, ETag=f'"{hashlib.sha1(content).hexdigest()}"')
        return self.reply(404)

    do_HEAD = do_GET


@contextmanager
def fake_hub() -> Iterator[ThreadingHTTPServer]:
    """A running server with `.url` and `.repositories`: {repository: {path: content}}."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.url, server.repositories = f"http://127.0.0.1:{server.server_port}", {}
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
