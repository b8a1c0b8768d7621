"""Local servers that speak a sandbox provider's HTTP: Docker's, Daytona's, Kubernetes'. Not those systems.

A sandbox is a folder; its commands really run, each in a `bwrap` of its own over that folder, so that a mistake in what
is run can't reach the host. `kill -9 -1` is carried out by ending the folder's other commands. `faults` say what goes
wrong: the first whose pattern is in "METHOD path" answers instead, as often as it says.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import re
import shutil
import struct
import tarfile
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from aiohttp import WSMsgType, web

KILL_ALL = "kill -9 -1"
NOBODY = ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups")
LATE = "late"  # carried out a moment later, never answered
HANG = "hang"  # not carried out, never answered
GARBAGE = "garbage"  # carried out, answered with no JSON


@dataclass
class Fault:
    pattern: str
    action: Any  # LATE, HANG, GARBAGE, or (status, headers)
    times: int = 1


@dataclass
class Box:
    """One sandbox of a fake."""

    ident: str
    name: str
    labels: dict[str, str]
    root: Path
    workdir: str
    env: dict[str, str]
    config: Any
    running: bool = False
    oom: bool = False
    jobs: set[asyncio.subprocess.Process] = field(default_factory=set)

    async def spawn(self, argv: list[str], stdin: bool = False, nobody: bool = True) -> asyncio.subprocess.Process:
        options = [
            "--unshare-pid",
            "--unshare-net",
            "--unshare-ipc",
            "--die-with-parent",
            "--bind",
            str(self.root),
            "/",
        ]
        options += ["--ro-bind", "/usr", "/usr", "--ro-bind", "/etc", "/etc", "--proc", "/proc", "--dev", "/dev"]
        for cap in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP", "CAP_DAC_OVERRIDE", "CAP_CHOWN", "CAP_FOWNER"):
            options += ["--cap-add", cap] if os.geteuid() == 0 else []
        pipe = asyncio.subprocess.PIPE
        job = await asyncio.create_subprocess_exec(
            "bwrap",
            *options,
            "--chdir",
            self.workdir if (self.root / self.workdir.lstrip("/")).is_dir() else "/",
            *(NOBODY if nobody else ()),
            *argv,
            stdin=pipe if stdin else asyncio.subprocess.DEVNULL,
            stdout=pipe,
            stderr=asyncio.subprocess.STDOUT,
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", **self.env},
        )
        self.jobs.add(job)
        return job

    def kill(self) -> None:
        for job in self.jobs:
            if job.returncode is None:
                job.kill()

    def put(self, data: bytes, into: str) -> None:
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            archive.extractall(self.root / into.lstrip("/"), filter="fully_trusted")

    def get(self, path: str) -> bytes | None:
        place = self.root / path.strip("/")
        if not place.is_dir():
            return None
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as archive:
            archive.add(place, arcname=place.name)
        return out.getvalue()


class Fake:
    """What the three have in common. Runs in a thread with a loop of its own, so that sync tests can use it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.boxes: dict[str, Box] = {}
        self.faults: list[Fault] = []
        self.calls: list[str] = []
        self.late: list[asyncio.Task[Any]] = []
        self.late_s = 0.6
        self.url = ""
        self.socket = f"{tempfile.mkdtemp()}/s"  # a path of a socket is at most 107 characters
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()
        assert self._ready.wait(10)

    def routes(self, app: web.Application) -> None:
        raise NotImplementedError

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)

        async def serve() -> web.AppRunner:
            app = web.Application(middlewares=[self._middle], client_max_size=1 << 30)
            self.routes(app)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            await web.UnixSite(runner, self.socket).start()
            self.url = f"http://127.0.0.1:{site.port}"
            return runner

        runner = self._loop.run_until_complete(serve())
        self._ready.set()
        self._loop.run_forever()
        for box in self.boxes.values():
            box.kill()
        self._loop.run_until_complete(asyncio.sleep(0.05))
        self._loop.run_until_complete(runner.cleanup())

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        shutil.rmtree(Path(self.socket).parent)

    @property
    def _middle(self) -> Any:
        @web.middleware
        async def middle(request: web.Request, handler: Any) -> Any:
            told = f"{request.method} {request.path_qs}"
            self.calls.append(told)
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.pattern, told):
                    fault.times -= 1
                    return await self._fail(fault.action, request, handler)
            return await handler(request)

        return middle

    async def _fail(self, action: Any, request: web.Request, handler: Any) -> Any:
        if action == LATE:
            await request.read()

            async def later() -> None:
                await asyncio.sleep(self.late_s)
                await handler(request)

            self.late.append(asyncio.ensure_future(later()))
        if action in (LATE, HANG):
            await asyncio.sleep(30)
            return web.Response(status=504)
        if action == GARBAGE:
            await handler(request)
            return web.Response(text="<html>proxy</html>")
        status, headers, *body = action
        return web.json_response(body[0] if body else {"message": f"scripted {status}"}, status=status, headers=headers)

    def made(self, name: str, labels: dict[str, str], workdir: str, env: dict[str, str], config: Any) -> Box:
        ident = uuid4().hex
        root = self.folder / ident
        for part in ("tmp", "root", workdir.lstrip("/")):
            (root / part).mkdir(parents=True)
        for link in ("bin", "sbin", "lib", "lib64"):
            if Path("/", link).is_symlink():
                (root / link).symlink_to(os.readlink(f"/{link}"))
        (root / "tmp").chmod(0o1777)
        box = Box(ident, name, labels, root, workdir, env, config)
        self.boxes[ident] = box
        return box

    def forget(self, ident: str) -> None:
        """It is gone, as if its host had been lost."""
        box = self.boxes.pop(ident)
        self._loop.call_soon_threadsafe(box.kill)

    def box_at(self, ident: str) -> Box:
        if ident not in self.boxes:
            raise web.HTTPNotFound(text=json.dumps({"message": f"No such container: {ident}, sandbox not found"}))
        return self.boxes[ident]


class FakeDocker(Fake):
    """Docker's HTTP API 1.43, as far as the provider uses it."""

    images = frozenset({"python:3.12-bookworm"})

    def __init__(self, folder: Path) -> None:
        self.execs: dict[str, dict[str, Any]] = {}
        self.pulled: set[str] = set(self.images)
        super().__init__(folder)

    def routes(self, app: web.Application) -> None:
        at = "/v1.43"
        app.router.add_post(f"{at}/containers/create", self.create)
        app.router.add_post(f"{at}/images/create", self.pull)
        app.router.add_get(f"{at}/containers/json", self.list)
        app.router.add_get(f"{at}/containers/{{id}}/json", self.inspect)
        app.router.add_post(f"{at}/containers/{{id}}/start", self.start)
        app.router.add_post(f"{at}/containers/{{id}}/kill", self.kill)
        app.router.add_post(f"{at}/containers/{{id}}/wait", self.wait)
        app.router.add_delete(f"{at}/containers/{{id}}", self.remove)
        app.router.add_put(f"{at}/containers/{{id}}/archive", self.put)
        app.router.add_get(f"{at}/containers/{{id}}/archive", self.get)
        app.router.add_post(f"{at}/containers/{{id}}/exec", self.exec_create)
        app.router.add_post(f"{at}/exec/{{id}}/start", self.exec_start)
        app.router.add_get(f"{at}/exec/{{id}}/json", self.exec_inspect)

    async def create(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["Image"] not in self.pulled:
            return web.json_response({"message": f"No such image: {body['Image']}"}, status=404)
        env = dict(item.split("=", 1) for item in body["Env"])
        box = self.made(request.query["name"], body["Labels"], body["WorkingDir"], env, body)
        return web.json_response({"Id": box.ident, "Warnings": []}, status=201)

    async def pull(self, request: web.Request) -> web.Response:
        image = f"{request.query['fromImage']}:{request.query['tag']}"
        if "missing" in image:
            return web.Response(text='{"status":"Pulling"}\r\n{"error":"manifest unknown"}\r\n')
        if "busy" in image:
            return web.json_response({"message": "toomanyrequests: the registry's limit"}, status=500)
        if "denied" in image:
            said = f"pull access denied for {image}, repository does not exist or may require 'docker login'"
            return web.json_response({"message": said}, status=404)
        self.pulled.add(image)
        return web.Response(text='{"status":"Pulling"}\r\n{"status":"Download complete"}\r\n')

    async def list(self, request: web.Request) -> web.Response:
        wanted = dict(item.split("=", 1) for item in json.loads(request.query["filters"])["label"])
        found = [box for box in self.boxes.values() if wanted.items() <= box.labels.items()]
        return web.json_response([{"Id": box.ident, "Labels": box.labels} for box in found])

    async def inspect(self, request: web.Request) -> web.Response:
        box = self.box_at(request.match_info["id"])
        state = {"Status": "running" if box.running else "exited", "OOMKilled": box.oom, "ExitCode": 137}
        return web.json_response({"Id": box.ident, "State": state})

    async def start(self, request: web.Request) -> web.Response:
        self.box_at(request.match_info["id"]).running = True
        return web.Response(status=204)

    async def kill(self, request: web.Request) -> web.Response:
        box = self.box_at(request.match_info["id"])
        if not box.running:
            return web.json_response({"message": "is not running"}, status=409)
        box.running = False
        box.kill()
        return web.Response(status=204)

    async def wait(self, request: web.Request) -> web.Response:
        box = self.box_at(request.match_info["id"])
        for job in box.jobs:
            await job.wait()
        return web.json_response({"StatusCode": 137})

    async def remove(self, request: web.Request) -> web.Response:
        box = self.box_at(request.match_info["id"])
        box.kill()
        del self.boxes[box.ident]
        return web.Response(status=204)

    async def put(self, request: web.Request) -> web.Response:
        self.box_at(request.match_info["id"]).put(await request.read(), request.query["path"])
        return web.Response()

    async def get(self, request: web.Request) -> web.Response:
        data = self.box_at(request.match_info["id"]).get(request.query["path"])
        if data is None:
            return web.json_response({"message": "Could not find the file"}, status=404)
        return web.Response(body=data, content_type="application/x-tar")

    async def exec_create(self, request: web.Request) -> web.Response:
        box = self.box_at(request.match_info["id"])
        if not box.running:
            return web.json_response({"message": "is not running"}, status=409)
        ident = uuid4().hex
        self.execs[ident] = {"box": box, "argv": (await request.json())["Cmd"], "job": None}
        return web.json_response({"Id": ident}, status=201)

    async def exec_start(self, request: web.Request) -> web.StreamResponse:
        made = self.execs[request.match_info["id"]]
        box: Box = made["box"]
        if KILL_ALL in made["argv"][-1]:
            box.kill()
        reply = web.StreamResponse(headers={"content-type": "application/vnd.docker.raw-stream"})
        await reply.prepare(request)
        made["job"] = job = await box.spawn(made["argv"])
        while data := await job.stdout.read(65536):
            for part in (data[:3], data[3:]):  # frames and chunks do not fall together
                await reply.write(struct.pack(">BxxxI", 1, len(part)) + part if part else b"")
        await job.wait()
        return reply

    async def exec_inspect(self, request: web.Request) -> web.Response:
        job = self.execs[request.match_info["id"]]["job"]
        code = None if job is None else job.returncode
        code = 128 - code if code is not None and code < 0 else code
        return web.json_response({"Running": code is None, "ExitCode": code})


class FakeDaytona(Fake):
    """Daytona's API and the toolbox of each sandbox behind one address."""

    key = "key-of-the-organization"
    limit = 100

    def routes(self, app: web.Application) -> None:
        app.router.add_post("/api/sandbox", self.create)
        app.router.add_get("/api/sandbox", self.list)
        app.router.add_get("/api/sandbox/{id}", self.look)
        app.router.add_delete("/api/sandbox/{id}", self.remove)
        app.router.add_post("/toolbox/{id}/process/execute", self.execute)
        app.router.add_post("/toolbox/{id}/files/upload", self.upload)
        app.router.add_get("/toolbox/{id}/files/download", self.download)

    def _told(self, box: Box) -> dict[str, Any]:
        box.config["looks"] = box.config.get("looks", 0) + 1
        box.running = box.config["looks"] > 1
        state = "started" if box.running else "creating"
        url = f"{self.url}/toolbox"
        return {"id": box.ident, "name": box.name, "labels": box.labels, "state": state, "toolboxProxyUrl": url}

    async def create(self, request: web.Request) -> web.Response:
        if request.headers.get("authorization") != f"Bearer {self.key}":
            return web.json_response({"message": "unauthorized"}, status=401)
        body = await request.json()
        if len(self.boxes) >= self.limit:
            return web.json_response({"message": "Total CPU quota exceeded"}, status=403)
        box = self.made(body["name"], body["labels"], "/app", body["env"], body)
        return web.json_response(self._told(box))

    async def list(self, request: web.Request) -> web.Response:
        wanted = json.loads(request.query["labels"])
        found = [box for box in self.boxes.values() if wanted.items() <= box.labels.items()]
        first = int(request.query.get("cursor", "0"))  # pages of two
        more = str(first + 2) if len(found) > first + 2 else None
        return web.json_response({"items": [self._told(box) for box in found[first : first + 2]], "nextCursor": more})

    async def look(self, request: web.Request) -> web.Response:
        return web.json_response(self._told(self.box_at(request.match_info["id"])))

    async def remove(self, request: web.Request) -> web.Response:
        box = self.box_at(request.match_info["id"])
        box.kill()
        del self.boxes[box.ident]
        return web.json_response({})

    async def execute(self, request: web.Request) -> web.Response:
        box = self.box_at(request.match_info["id"])
        body = await request.json()
        coded = re.search(r"echo (\S+) \| base64 -d", body["command"])
        assert coded is not None
        if KILL_ALL in base64.b64decode(coded[1]).decode():
            box.kill()
        job = await box.spawn(["bash", "-c", body["command"]], nobody=False)
        try:
            async with asyncio.timeout(body["timeout"]):
                said, _ = await job.communicate()
        except TimeoutError:
            return web.json_response({"message": "command execution timeout"}, status=408)
        code = job.returncode if job.returncode >= 0 else 128 - job.returncode
        return web.json_response({"exitCode": code, "result": said.decode()})

    async def upload(self, request: web.Request) -> web.Response:
        box = self.box_at(request.match_info["id"])
        async for part in await request.multipart():
            (box.root / request.query["path"].lstrip("/")).write_bytes(await part.read())
        return web.json_response({})

    async def download(self, request: web.Request) -> web.Response:
        box = self.box_at(request.match_info["id"])
        return web.Response(body=(box.root / request.query["path"].lstrip("/")).read_bytes())


class FakeKubernetes(Fake):
    """The API server's pods of one namespace, their policy, and exec over a websocket (v4.channel.k8s.io)."""

    token = "token-of-the-account"

    def __init__(self, folder: Path) -> None:
        self.has_policy = True
        self.pulls_fail = 0  # looks at a pod while its image does not come
        self.pull_says = "toomanyrequests"
        self.deletes_after_s = 0.0
        super().__init__(folder)

    def routes(self, app: web.Application) -> None:
        at = "/api/v1/namespaces/rl/pods"
        app.router.add_get("/apis/networking.k8s.io/v1/namespaces/rl/networkpolicies/{name}", self.policy)
        app.router.add_post(at, self.create)
        app.router.add_get(at, self.list)
        app.router.add_get(at + "/{name}", self.look)
        app.router.add_delete(at + "/{name}", self.remove)
        app.router.add_get(at + "/{name}/exec", self.exec)

    def _named(self, request: web.Request) -> Box:
        name = request.match_info["name"]
        found = [box for box in self.boxes.values() if box.name == name]
        if not found:
            raise web.HTTPNotFound(
                text=json.dumps({"kind": "Status", "reason": "NotFound", "message": f"no pod {name}"})
            )
        return found[0]

    def _pod(self, box: Box) -> dict[str, Any]:
        box.config["looks"] = box.config.get("looks", 0) + 1
        box.running = box.config["looks"] > 1
        state = {"running": {}} if box.running else {"waiting": {"reason": "ContainerCreating"}}
        if self.pulls_fail > 0:
            self.pulls_fail, box.running = self.pulls_fail - 1, False
            state = {"waiting": {"reason": "ErrImagePull", "message": self.pull_says}}
        if box.oom:
            state = {"terminated": {"reason": "OOMKilled", "exitCode": 137}}
        phase = "Failed" if box.oom else "Running" if box.running else "Pending"
        status = {"phase": phase, "containerStatuses": [{"name": "sandbox", "state": state}]}
        metadata = {**box.config["metadata"], "uid": box.ident}
        return {"kind": "Pod", "metadata": metadata, "spec": box.config["spec"], "status": status}

    async def policy(self, request: web.Request) -> web.Response:
        return (
            web.json_response({"kind": "NetworkPolicy"})
            if self.has_policy
            else web.json_response({"kind": "Status", "reason": "NotFound"}, status=404)
        )

    async def create(self, request: web.Request) -> web.Response:
        if request.headers.get("authorization") != f"Bearer {self.token}":
            return web.json_response({"message": "unauthorized"}, status=401)
        body = await request.json()
        name = body["metadata"]["name"]
        if any(box.name == name for box in self.boxes.values()):
            return web.json_response({"kind": "Status", "reason": "AlreadyExists"}, status=409)
        (container,) = body["spec"]["containers"]
        env = {item["name"]: item["value"] for item in container["env"]}
        box = self.made(name, body["metadata"]["labels"], container["workingDir"], env, body)
        for mount in container["volumeMounts"]:
            place = box.root / mount["mountPath"].lstrip("/")
            place.mkdir(parents=True, exist_ok=True)
            place.chmod(0o777)
        return web.json_response(self._pod(box), status=201)

    async def list(self, request: web.Request) -> web.Response:
        wanted = dict(item.split("=", 1) for item in request.query["labelSelector"].split(","))
        found = [box for box in self.boxes.values() if wanted.items() <= box.labels.items()]
        first = int(request.query.get("continue", "0"))
        last = first + int(request.query["limit"])
        more = {"continue": str(last)} if last < len(found) else {}
        return web.json_response(
            {"kind": "PodList", "metadata": more, "items": [self._pod(box) for box in found[first:last]]}
        )

    async def look(self, request: web.Request) -> web.Response:
        return web.json_response(self._pod(self._named(request)))

    async def remove(self, request: web.Request) -> web.Response:
        box = self._named(request)
        body = await request.json()
        assert body["gracePeriodSeconds"] > 0, "a forced delete proves nothing"
        if body["preconditions"]["uid"] != box.ident:
            return web.json_response({"message": "another uid"}, status=409)
        box.kill()

        async def gone() -> None:
            await asyncio.sleep(self.deletes_after_s)
            self.boxes.pop(box.ident, None)

        self.late.append(asyncio.ensure_future(gone()))
        return web.json_response(self._pod(box))

    async def exec(self, request: web.Request) -> web.WebSocketResponse:
        box = self._named(request)
        socket = web.WebSocketResponse(protocols=("v4.channel.k8s.io",), max_msg_size=0)
        await socket.prepare(request)
        argv = request.query.getall("command")
        sends = request.query.get("stdin") == "1"
        if KILL_ALL in argv[-1]:
            box.kill()
        job = await box.spawn(argv, stdin=sends)

        async def feed() -> None:
            async for message in socket:
                if message.type is WSMsgType.BINARY and message.data[0] == 0 and job.stdin is not None:
                    job.stdin.write(message.data[1:])
                    await job.stdin.drain()

        feeding = asyncio.ensure_future(feed())
        try:
            while data := await job.stdout.read(65536):
                await socket.send_bytes(b"\x01" + data)
            code = await job.wait()
            code = code if code >= 0 else 128 - code
            causes = [{"reason": "ExitCode", "message": str(code)}]
            failed = {"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": causes}}
            await socket.send_bytes(b"\x03" + json.dumps({"status": "Success"} if code == 0 else failed).encode())
        except ConnectionResetError:
            pass  # the client hung up; the command goes on, as it does in a pod
        finally:
            feeding.cancel()
        await socket.close()
        return socket


def until(condition: Any, seconds: float = 8.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return bool(condition())
