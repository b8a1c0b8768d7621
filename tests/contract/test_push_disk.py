"""Weights as files on real engines with a strict door: a real trainer's steps through a real S3, full and as deltas.

Two engines run the trainer's tiny model, on all addresses of this host, and are called at one that is not loopback, as
from another host. The transport and the acts of a push (pause, name, transfer, check, admit,
resume) are this file's, step by step, so that each refusal can be met where it belongs.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from rl360.bench.delta import compare
from rl360.config.run import PushConfig
from rl360.config.services import load_services
from rl360.engines.client import EngineClient, EngineRefused, open_http
from rl360.engines.fleet import EngineIdentity, incarnation_of
from rl360.engines.gateway import GatewayClient
from rl360.training.client import TrainerClient
from rl360.weights import fence
from rl360.weights.checksum import expected_checksums, tensor_specs
from rl360.weights.delta import open_folder, open_tensors, write_version
from rl360.weights.messages import EngineSet, PushPlan, PushRecord, TransferReport
from rl360.weights.plan import plan_push
from rl360.weights.push import ensure_weights
from rl360.weights.transports import Senders
from tests.contract.session_rig import far_address, free_port, process
from tests.contract.trainer_rig import TOKEN, Rig

pytestmark = [pytest.mark.contract, pytest.mark.timeout(900)]

RUN = "files"
STEPS = 4
AUTH = {"Authorization": f"Bearer {TOKEN}"}
Tensors = dict[str, torch.Tensor]


class Fleet:
    """Two strict engines, the weights of every version, and the trainer's side of a push."""

    def __init__(self, rig: Rig, urls: list[str], versions: list[Tensors]) -> None:
        self.rig, self.urls, self.versions = rig, urls, versions
        self.senders = Senders()
        self.epoch = 0

    def ask(self, url: str, call: Callable[[EngineClient], Coroutine[Any, Any, Any]], epoch: int | None = None) -> Any:
        async def go() -> Any:
            async with open_http() as http:
                return await call(EngineClient(url, http, 30, self.epoch if epoch is None else epoch, TOKEN))

        return asyncio.run(go())

    def everywhere(self, call: Callable[[EngineClient], Coroutine[Any, Any, Any]]) -> list[Any]:
        return [self.ask(url, call) for url in self.urls]

    def plan(self, version: int, base: int | None, folder: str | None = None) -> PushPlan:
        infos = [httpx.get(f"{url}/server_info", timeout=30).json() for url in self.urls]
        engines = tuple(
            EngineIdentity(url=url, incarnation=incarnation_of(info))
            for url, info in zip(self.urls, infos, strict=True)
        )
        return plan_push(
            tensor_specs(self.versions[version]),
            EngineSet(epoch=self.epoch, engines=engines),
            run=RUN,
            version=f"{RUN}:{version}",
            bucket_bytes=1 << 20,
            call_deadline_s=30,
            transport="disk_full" if base is None else "disk_delta",
            folder=folder or f"s3://rl360/{RUN}/weights/{self.epoch:06}",
            base_version=None if base is None else f"{RUN}:{base}",
        )

    def push(self, version: int, base: int | None, meanwhile: Callable[[], None] = lambda: None) -> TransferReport:
        """A push as `rl360.weights.push` makes it; ends admitted and resumed."""
        self.epoch += 1
        plan, tensors = self.plan(version, base), self.versions[version]
        self.senders.prepare(plan, tensors)
        meanwhile()
        self.everywhere(lambda client: client.pause("retract"))
        self.everywhere(lambda client: client.set_weight_version(f"{RUN}:{version}#loading-{self.epoch}"))
        report = self.senders.transfer(plan, tensors)
        assert report.ok, report
        for held in self.everywhere(lambda client: client.checksums()):
            assert held == expected_checksums(tensors)
        self.everywhere(lambda client: client.set_weight_version(f"{RUN}:{version}"))
        self.everywhere(lambda client: client.flush_cache())
        self.everywhere(lambda client: client.admit(f"{RUN}:{version}"))
        self.everywhere(lambda client: client.resume())
        return report

    def weights_dir(self, url: str) -> Path:
        return self.rig.folder / "engines" / url.rsplit(":", 1)[1]


def generate(url: str) -> httpx.Response:
    sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    body = {"input_ids": [11, 12, 13, 14], "sampling_params": sampling}
    return httpx.post(f"{url}/generate", json=body, headers=AUTH, timeout=60)


def sampled(url: str) -> tuple[list[int], str]:
    reply = generate(url)
    assert reply.status_code == 200, reply.text
    return reply.json()["output_ids"], reply.json()["meta_info"]["weight_version"]


def launch_argv(model: Path, url: str) -> list[str]:
    return [sys.executable, "-m", "rl360.engines.launch", "--model", str(model), "--port", url.rsplit(":", 1)[1]]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    made = Rig(tmp_path_factory.mktemp("disk"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def versions(rig: Rig) -> list[Tensors]:
    """What travels as each version of a run: the trainer's own exports between steps."""
    from rl360.policy.tokenizer import save_tokenizer, train_tokenizer

    save_tokenizer(train_tokenizer(), rig.model)
    rig.new_run(RUN)
    found = []
    for step in range(STEPS):
        folder = rig.folder / f"export-{step}"
        reply = rig.ask("POST", f"/runs/{RUN}/export", {"dir": str(folder), "dtype": "bfloat16"})
        assert reply.status_code == 200, reply.text
        found.append(load_file(folder / "model.safetensors"))
        rig.train(RUN, step)
    return found


@pytest.fixture(scope="module")
def fleet(rig: Rig, versions: list[Tensors]) -> Iterator[Fleet]:
    env = {"RL360_HOME": str(rig.folder), "RL360_TOKEN_FILE": str(rig.folder / "token")}
    urls = [f"http://{far_address()}:{free_port()}" for _ in range(2)]
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        for index, url in enumerate(urls):
            argv = [*launch_argv(rig.model, url), "--door", "strict", "--host", "0.0.0.0"]
            stack.enter_context(process(argv, f"{url}/ping", rig.folder / f"engine-{index}.log", env, 400))
        made = Fleet(rig, urls, versions)
        yield made
        made.senders.close()


def test_a_fresh_engine_generates_nothing_and_obeys_nobody_without_an_epoch(fleet: Fleet) -> None:
    url = fleet.urls[0]
    reply = generate(url)
    assert reply.status_code == 503
    assert reply.json() == {"error": "not serving: no push has admitted this engine yet"}
    chat = {"model": "x", "messages": [{"role": "user", "content": "hi"}]}
    for path, body in (("/v1/chat/completions", chat), ("/pause_generation", {"mode": "abort"})):
        assert httpx.post(url + path, json=body, timeout=30).status_code == 401
    assert httpx.post(f"{url}/v1/chat/completions", json=chat, headers=AUTH, timeout=30).status_code == 503
    bare = httpx.post(f"{url}/pause_generation", json={"mode": "abort"}, headers=AUTH, timeout=30)
    assert bare.status_code == 409
    for path in ("/ping", "/server_info", "/model_info"):
        assert httpx.get(url + path, timeout=30).status_code == 200
    facts = httpx.get(f"{url}/rl360/door", headers=AUTH, timeout=30).json()
    assert (facts["epoch"], facts["admitted_version"]) == (0, None)


def test_full_then_deltas_bring_both_engines_to_the_trainers_checksums(fleet: Fleet) -> None:
    incarnations = [httpx.get(f"{url}/server_info", timeout=30).json() for url in fleet.urls]
    full = fleet.push(0, None)
    assert [(e.calls, e.note) for e in full.engines] == [(2, "")] * 2
    before = [sampled(url) for url in fleet.urls]
    assert {version for _, version in before} == {f"{RUN}:0"}

    def still_serving() -> None:
        """The files are there, and the engines generate with the old weights."""
        assert [sampled(url) for url in fleet.urls] == before
        assert all((fleet.weights_dir(url) / f"{RUN}-1").is_dir() for url in fleet.urls)

    delta = fleet.push(1, 0, still_serving)
    assert [(e.calls, e.note) for e in delta.engines] == [(2, "")] * 2
    after = [sampled(url) for url in fleet.urls]
    assert {version for _, version in after} == {f"{RUN}:1"} and after[0] == after[1]
    assert delta.sent_bytes < full.sent_bytes
    assert delta.seconds < 10
    now = [httpx.get(f"{url}/server_info", timeout=30).json() for url in fleet.urls]
    assert list(map(incarnation_of, now)) == list(map(incarnation_of, incarnations))


def test_an_old_epoch_is_refused_and_changes_nothing(fleet: Fleet) -> None:
    held, told = fleet.everywhere(lambda c: c.checksums()), [sampled(url) for url in fleet.urls]
    other = str(fleet.rig.folder / "export-0")
    acts: list[Callable[[EngineClient], Coroutine[Any, Any, Any]]] = [
        lambda c: c.pause("abort"),
        lambda c: c.update_from_disk(other),
        lambda c: c.set_weight_version("files:9"),
        lambda c: c.begin_weight_update(),
        lambda c: c.abort_all(),
        lambda c: c.bar("I was asleep"),
    ]
    for act in acts:
        for url in fleet.urls:
            with pytest.raises(EngineRefused, match=r"409.*epoch 1 is over: 2 has begun"):
                fleet.ask(url, act, epoch=1)
    assert fleet.everywhere(lambda c: c.checksums()) == held
    assert [sampled(url) for url in fleet.urls] == told


def test_a_wrong_base_is_refused_and_that_engine_gets_every_tensor(fleet: Fleet) -> None:
    damaged = fleet.weights_dir(fleet.urls[1]) / f"{RUN}-1"
    path = next(damaged.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    held = fleet.everywhere(lambda c: c.checksums())
    folder = f"s3://rl360/{RUN}/by-hand"
    third, first = (open_tensors(fleet.rig.folder / f"export-{step}") for step in (3, 1))
    write_version(open_folder(folder), third, f"{RUN}:3", first, f"{RUN}:1")
    with pytest.raises(EngineRefused, match=r"409.*tensor \S+ has sha256 \w+, files:1 has"):
        fleet.ask(fleet.urls[1], lambda c: c.pull(folder, f"{RUN}:3", f"{RUN}:1", 30))
    with pytest.raises(EngineRefused, match=r"409.*files:9 is not held here"):
        fleet.ask(fleet.urls[0], lambda c: c.pull(folder, f"{RUN}:3", f"{RUN}:9", 30))
    assert fleet.everywhere(lambda c: c.checksums()) == held
    report = fleet.push(2, 1)
    notes = [engine.note for engine in report.engines]
    assert notes[0] == "" and notes[1].startswith("all tensors: ") and "files:1 has" in notes[1]
    assert [engine.calls for engine in report.engines] == [2, 3]
    assert {sampled(url)[1] for url in fleet.urls} == {f"{RUN}:2"}


def test_a_trainer_without_the_base_sends_every_tensor_and_says_so(fleet: Fleet) -> None:
    fleet.senders.close()  # as a trainer that was started again
    report = fleet.push(3, 2)
    assert {engine.note for engine in report.engines} == {"all tensors: this trainer holds no base files:2"}


def test_damaged_files_reach_no_engine(fleet: Fleet) -> None:
    told = [sampled(url) for url in fleet.urls]
    fleet.epoch += 1
    shared = fleet.rig.folder / "shared"
    plan = fleet.plan(2, None, str(shared))
    fleet.senders.prepare(plan, fleet.versions[2])
    shard = next((shared / "full").glob("shard-*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    for path in (fleet.weights_dir(url) / f"{RUN}-2" for url in fleet.urls):
        for file in path.iterdir():
            file.unlink()
    with pytest.raises(EngineRefused, match=r"422.*full/shard-00000\.zst: has \d+ bytes"):
        fleet.ask(fleet.urls[0], lambda c: c.pull(f"{shared}/full", f"{RUN}:2", None, 30))
    assert [sampled(url) for url in fleet.urls] == told and told[0][1] == f"{RUN}:3"


def test_requests_that_meet_a_push_wait_for_its_end(fleet: Fleet) -> None:
    url = fleet.urls[0]

    async def go(end: Callable[[EngineClient], Coroutine[Any, Any, Any]]) -> httpx.Response:
        fleet.epoch += 1
        async with open_http() as http:
            push = EngineClient(url, http, 30, fleet.epoch, TOKEN)
            await push.pause("retract")
            waiting = asyncio.create_task(asyncio.to_thread(generate, url))
            await asyncio.sleep(0.5)
            await push.set_weight_version(f"{RUN}:3")
            assert not waiting.done()
            await end(push)
            await push.resume()
            return await waiting

    assert asyncio.run(go(lambda push: push.admit(f"{RUN}:3"))).status_code == 200
    refused = asyncio.run(go(lambda push: push.bar("the push failed")))
    assert (refused.status_code, refused.json()["error"]) == (503, "not serving: the push failed")
    assert generate(url).status_code == 503
    fleet.everywhere(lambda c: c.admit(f"{RUN}:3"))


@pytest.fixture
def gateway_url(rig: Rig) -> Iterator[str]:
    port, metrics = free_port(), free_port()
    argv = [str(Path(sys.executable).parent / "smg"), "launch", "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--policy", "manual", "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)]
    argv += ["--disable-tokenizer-autoload", "--health-check-endpoint", "/ping", "--health-check-interval-secs", "1"]
    url = f"http://127.0.0.1:{port}"
    with process([*argv, "--log-level", "debug"], f"{url}/liveness", rig.folder / "gateway.log"):
        yield url


def through(gateway_url: str) -> httpx.Response:
    """As a session server asks: without a token."""
    body = {"input_ids": [11, 12], "sampling_params": {"temperature": 0, "max_new_tokens": 2}}
    return httpx.post(f"{gateway_url}/generate", json=body, timeout=60)


def test_a_gateway_that_was_told_no_token_gets_nothing(fleet: Fleet, gateway_url: str) -> None:
    async def register() -> None:
        async with open_http() as http:
            await GatewayClient(gateway_url, http).add(fleet.urls[0], 30)

    asyncio.run(register())
    assert through(gateway_url).status_code == 401


def test_a_push_of_the_trainer_reaches_engines_of_other_hosts(fleet: Fleet, gateway_url: str) -> None:
    """The product's own push: trainer, pusher and gateway show the token, and nobody else gets in."""
    rig, version = fleet.rig, f"{RUN}:{STEPS}"
    services = load_services(rig.folder).model_copy(update={"gateway_url": gateway_url, "engine_urls": fleet.urls})
    # the doors have seen epochs that this store knows nothing of
    before = fence.end_key(fleet.epoch), _over(fleet.epoch).model_dump_json().encode()
    rig.store.put_once(*before)

    async def go() -> PushRecord:
        async with open_http() as http:
            trainer = TrainerClient(rig.url, http, services.auth_headers(), deadline_s=120)
            await trainer.open_run(RUN)
            record = await ensure_weights(rig.store, services, RUN, version, trainer, PushConfig(call_deadline_s=20))
        assert record is not None
        return record

    record = asyncio.run(go())
    fleet.epoch = record.epoch
    assert [engine.identity.url for engine in record.serving] == fleet.urls
    reply = through(gateway_url)
    assert (reply.status_code, reply.json()["meta_info"]["weight_version"]) == (200, version)
    for url in fleet.urls:
        assert sampled(url)[1] == version
        assert httpx.post(f"{url}/generate", json={}, timeout=30).status_code == 401
    # where the token must not be
    told = [httpx.get(f"{gateway_url}/workers", timeout=30).text, record.model_dump_json()]
    told += [path.read_text(errors="replace") for path in rig.folder.glob("*.log")]
    assert all(TOKEN not in text for text in told)


def _over(epoch: int) -> PushRecord:
    told = {"run": RUN, "step": None, "version": f"{RUN}:0", "engines": (), "path": "disk_full", "status": "failed"}
    return PushRecord(epoch=epoch, **told)


@pytest.mark.parametrize("lr", ["1e-3", "1e-5", "1e-6"])
def test_bytes_and_time_of_a_real_step(rig: Rig, tmp_path: Path, lr: str) -> None:
    """What one step changes, by how far it goes. The figures are for who reads the log: the model is tiny."""
    run = rig.new_run(f"lr-{lr}", trainer={"lr": float(lr)})
    folders = [tmp_path / name for name in ("before", "after")]
    for folder in folders:
        if folder.name == "after":
            rig.train(run, 0)
        reply = rig.ask("POST", f"/runs/{run}/export", {"dir": str(folder), "dtype": "bfloat16"})
        assert reply.status_code == 200, reply.text
    base, new = map(open_tensors, folders)
    costs = compare(rig.model, base, new, tmp_path)
    print(f"\nlr {lr}: {costs}")
    assert costs.full.bytes < costs.tensor_bytes
    assert costs.delta.bytes < costs.full.bytes * (0.6 if lr == "1e-3" else 0.25)
    assert set(costs.encodings) <= {"xor", "overwrite"} and sum(costs.encodings.values()) == len(new)


@pytest.mark.parametrize("flags", [["--tokenizer-worker-num", "2"], ["--grpc-port", "1234"]])
def test_an_engine_that_would_serve_past_its_door_is_not_started(rig: Rig, versions: object, flags: list[str]) -> None:
    argv = [*launch_argv(rig.model, f"http://127.0.0.1:{free_port()}"), "--", *flags]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=180, check=False)
    assert ended.returncode == 1
    assert "serves past the engine's door" in ended.stderr.splitlines()[-1]


def test_files_in_s3_are_those_of_the_last_push(fleet: Fleet) -> None:
    """The next but one push deletes them; the damaged one before went to a shared folder."""
    assert {key.split("/")[2] for key in fleet.rig.store.list(f"{RUN}/weights/")} == {"000004"}
