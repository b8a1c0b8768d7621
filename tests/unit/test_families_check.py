"""The checks find what is wrong with a template, a directory or an engine, and say it; good ones pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from rl360.commands import templates
from rl360.errors import BadInput, ServiceError
from rl360.sessions.families.base import ChatTemplate
from rl360.sessions.families.check import Report, check_stock, check_template
from rl360.sessions.families.live import Row, check_engine
from rl360.sessions.families.registry import FAMILIES, load_template, stock_template
from tests.unit.families_data import (
    VOCAB_SIZE,
    family_template,
    stock_tokenizer,
    token_ids,
    tokenizer_json,
    write_family_dir,
)

# a template with the habits of many published ones: thinking of turns before the last question is dropped, and a line
# break follows every end of turn
STOCK = (
    "{%- set ns = namespace(last=-1) -%}{%- for m in messages if m.role == 'user' -%}"
    "{%- set ns.last = messages.index(m) -%}{%- endfor -%}"
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' -}}"
    "{%- if m.reasoning_content and loop.index0 > ns.last -%}{{- '<think>\\n' + m.reasoning_content + '</think>' -}}"
    "{%- endif -%}{{- m.content + '<|im_end|>\\n' -}}{%- endfor -%}"
    '{#- enable_thinking <tool_response> "arguments":  -#}'
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


@pytest.mark.parametrize("family", FAMILIES)
def test_good_templates_pass(family: str) -> None:
    report = check_template(family_template(family))
    assert report.findings == []
    assert report.shapes >= 60
    assert report.turns > 2 * report.shapes


def _bad(family: str, old: str, new: str) -> Report:
    text = FAMILIES[family].template_text()
    assert old in text
    return check_template(ChatTemplate(FAMILIES[family], tokenizer_json(family), VOCAB_SIZE, text.replace(old, new)))


@pytest.mark.parametrize(
    ("family", "old", "new", "said"),
    [
        # thinking only in the last turn
        ("qwen3", "elif message.reasoning_content is", "elif loop.last and message.reasoning_content is", "<think>"),
        ("glm4", "('' if silent else message", "('' if silent or not loop.last else message", "</think>"),
        # the line break goes back behind the end token
        ("qwen3", "{%- set ns.gap = '\\n' -%}\n{%- endfor -%}", "{{- '\\n' -}}{%- endfor -%}", "only stop id"),
        # an end token before the end of the turn
        ("rl360-chat", "'</tool_call>'", "'</tool_call><|im_end|>'", "only stop id"),
        # something that counts the messages
        (
            "rl360-chat",
            "'<|im_start|>' + message.role",
            "'<|im_start|>' + message.role + messages|length|string",
            "not append-only",
        ),
        # a reminder for the last message only
        (
            "qwen3",
            "+ system + '<|im_end|>'",
            "+ system + ('!' if messages[-1].role == 'tool' else '') + '<|im_end|>'",
            "at id",
        ),
        # the empty block that closes thinking is only in the prompt
        ("qwen3", "'<think>\\n\\n</think>\\n\\n' -}}\n{%- elif", "'' -}}\n{%- elif", "not append-only"),
        # calls in another spelling than is read back
        ("qwen3", '{"name": ', '{"tool": ', "is read as"),
        ("glm4", "'</arg_key>\\n<arg_value>'", "'<arg_value>'", "is read as"),
        # content lost
        ("rl360-chat", "(message.content or '')", "(message.content or '') | trim", "is read as"),
    ],
)
def test_bad_templates_are_caught(family: str, old: str, new: str, said: str) -> None:
    report = _bad(family, old, new)
    assert report.failing >= 1
    assert any(said in finding.problem for finding in report.findings), report.findings[:3]


def test_a_finding_names_the_place_in_words() -> None:
    report = _bad("qwen3", "elif message.reasoning_content is", "elif loop.last and message.reasoning_content is")
    finding = next(f for f in report.findings if f.shape == "thinking, thinking on")
    assert finding.turn == 1
    assert finding.problem == (
        "at id 9, after 'a<|im_end|>\\n<|im_start|>assistant\\n', the session holds "
        "'<think>\\none\\n\\ntwo\\n</think>\\n\\nb<|im_end|>\\n<|im_start|>user\\nc<|i', the longer conversation "
        "'b<|im_end|>\\n<|im_start|>user\\nc<|im_end|>\\n<|im_start|>assista'"
    )


def test_a_models_own_template_is_shown_for_what_it_is(tmp_path: Path) -> None:
    folder = write_family_dir(tmp_path / "m", "qwen3", STOCK)
    report = check_stock(STOCK, folder / "tokenizer.json", load_template(folder))
    assert report.never_sampled == {"\n"}
    assert 0 < report.failing < report.shapes
    assert any("thinking" in finding.shape and "<think>" in finding.problem for finding in report.findings)
    own = check_stock(FAMILIES["glm4"].template_text(), folder / "tokenizer.json", load_template(folder))
    assert own.never_sampled == set()
    refusing = check_stock("{{ raise_exception('no tools') }}", folder / "tokenizer.json", load_template(folder))
    assert refusing.failing == refusing.shapes
    with pytest.raises(BadInput, match="does not compile"):
        check_stock("{% if %}", folder / "tokenizer.json", load_template(folder))


def test_directories_are_recognised(tmp_path: Path) -> None:
    for family in FAMILIES:
        assert load_template(write_family_dir(tmp_path / family, family)).family == family
    folder = write_family_dir(tmp_path / "stock", "qwen3", STOCK)
    assert load_template(folder).family == "qwen3"
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_bytes(orjson.dumps({"chat_template": STOCK}))
    assert stock_template(folder) == STOCK
    assert load_template(folder).family == "qwen3"


def test_unknown_directories_are_refused_with_the_reason(tmp_path: Path) -> None:
    def refused(reason: str, family: str = "qwen3", stock: str | None = STOCK, **config: Any) -> None:
        folder = write_family_dir(tmp_path / "m", family, stock)
        if config:
            (folder / "config.json").write_bytes(orjson.dumps({"vocab_size": VOCAB_SIZE, **config}))
        with pytest.raises(BadInput, match=reason):
            load_template(folder)

    refused(r"qwen3: model_type is 'llama', not qwen3 or qwen3_moe; glm4: model_type is 'llama'", model_type="llama")
    refused(r"qwen3: model_type is None", vocab_size=VOCAB_SIZE, other=1)
    refused(r"qwen3: the tokenizer lacks <\|im_start\|>", family="glm4", model_type="qwen3")
    refused(r"never writes 'enable_thinking'.*another format", stock="{{ messages }}")
    refused(r"names family qwen3 and is not a template of this rl360", stock="{#- family: qwen3. Old. -#}")
    refused("vocab_size 10 is below", vocab_size=10)
    refused("config.json names no vocab_size", vocab_size=None)
    with pytest.raises(BadInput, match=r"config.json: No such file or directory; name a .* `rl360 model warm-start`$"):
        load_template(tmp_path / "nothing")
    (tmp_path / "m" / "config.json").write_text("{")
    with pytest.raises(BadInput, match=r"config.json is not JSON: "):
        load_template(tmp_path / "m")
    folder = write_family_dir(tmp_path / "m", "qwen3", "{{ messages }}")
    assert load_template(folder, "qwen3").family == "qwen3"
    with pytest.raises(BadInput, match="lacks the tokens"):
        load_template(folder, "glm4")
    with pytest.raises(BadInput, match="no family 'qwen4'; known are rl360-chat, qwen3, glm4"):
        load_template(folder, "qwen4")


class FakeEngine:
    """Answers as an engine does; `tamper` spoils a reply before it leaves."""

    def __init__(self, family: str) -> None:
        self.family = family
        self.replies = {"qwen3": "<think>\nx\n</think>\n\ndone<|im_end|>", "glm4": "\n<think>x</think>\ndone<|user|>"}
        self.held: list[int] = []
        self.tamper: Callable[[dict[str, Any]], None] = lambda reply: None
        self.tokenize_status = 200
        self.tokenize_shift = 0
        self.url = ""
        self.server_info: dict[str, Any] = {"page_size": 1}

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        ids, params = body["input_ids"], body["sampling_params"]
        sampled = token_ids(self.family, self.replies[self.family])
        if params.get("logit_bias"):
            sampled = [int(next(iter(params["logit_bias"])))]
        stops = [i for i, token in enumerate(sampled) if token in params["stop_token_ids"]]
        sampled = sampled[: stops[0] + 1] if stops else sampled
        sampled = sampled[: params["max_new_tokens"]]
        same = next((i for i, (a, b) in enumerate(zip(self.held, ids, strict=False)) if a != b), None)
        cached = min(len(self.held), len(ids)) if same is None else same
        self.held = ids + sampled[:-1]
        reply = {
            "text": stock_tokenizer(self.family).decode(sampled, skip_special_tokens=False),
            "output_ids": sampled,
            "prompt_token_ids": list(ids),
            "meta_info": {
                "finish_reason": {"type": "stop" if stops else "length"},
                "cached_tokens": cached,
                "output_token_logprobs": [[-0.5, token, None] for token in sampled],
            },
        }
        self.tamper(reply)
        return reply

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/tokenize":
            return self.tokenize_status, {
                "tokens": [i + self.tokenize_shift for i in token_ids(self.family, body["prompt"])]
            }
        known = {"/model_info": {"model_path": "m", "weight_version": "run:0"}, "/server_info": self.server_info}
        if path == "/generate":
            return 200, self.generate(body)
        return (200, known[path]) if path in known else (404, {})


@pytest.fixture(params=["qwen3", "glm4"])
def engine(request: pytest.FixtureRequest) -> Iterator[FakeEngine]:
    fake = FakeEngine(request.param)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            size = int(self.headers.get("content-length") or 0)
            status, answer = fake.answer(self.path, orjson.loads(self.rfile.read(size)) if size else {})
            content = orjson.dumps(answer)
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, *args: Any) -> None:
            """Nothing on stderr."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield fake
    server.shutdown()
    thread.join()
    server.server_close()


def _broken(engine: FakeEngine) -> list[Row]:
    engine.held = []
    return [row for row in check_engine(family_template(engine.family), engine.url) if row.holds is False]


def test_a_good_engine_holds(engine: FakeEngine) -> None:
    rows = check_engine(family_template(engine.family), engine.url)
    assert {row.holds for row in rows} == {True}, rows
    assert any("in the template's own spelling" in row.detail for row in rows)
    engine.tokenize_status = 404
    engine.server_info = {"disable_radix_cache": True}
    unseen = [row.name for row in check_engine(family_template(engine.family), engine.url) if row.holds is None]
    assert unseen == [
        "engine's tokenizer agrees",
        "turn 2 continues a cached prefix",
        "turn 2 continues a cached prefix, thinking",
    ]


def test_a_turn_that_never_ends_is_ended_for_the_check(engine: FakeEngine) -> None:
    engine.replies[engine.family] = "hello " * 40
    assert _broken(engine) == []


@pytest.mark.parametrize(
    ("tamper", "said"),
    [
        (lambda r: r["prompt_token_ids"].pop(), "another prompt"),
        (lambda r: r["meta_info"]["output_token_logprobs"].pop(), "log-probabilities"),
        (lambda r: r["meta_info"]["output_token_logprobs"].__setitem__(0, [None, 1, None]), "log-probabilities"),
        (lambda r: r["meta_info"].update(finish_reason={"type": "abort"}), "finish_reason abort"),
        (lambda r: r["meta_info"].update(cached_tokens=3), "were cached, expected at least"),
        (lambda r: r.update(text="something else"), "the engine reads its ids as"),
        (lambda r: (r["output_ids"].pop(), r["meta_info"]["output_token_logprobs"].pop()), "finish_reason stop"),
    ],
)
def test_what_an_engine_does_otherwise_is_named(
    engine: FakeEngine, tamper: Callable[[dict[str, Any]], None], said: str
) -> None:
    engine.tamper = tamper
    assert any(said in row.detail for row in _broken(engine))


def test_another_tokenizer_and_no_engine(engine: FakeEngine) -> None:
    engine.tokenize_shift = 1
    assert [row.name for row in _broken(engine)] == ["engine's tokenizer agrees"]
    with pytest.raises(ServiceError, match="no answer"):
        check_engine(family_template(engine.family), "http://127.0.0.1:1")
    with pytest.raises(ServiceError, match="is this an SGLang engine"):
        check_engine(family_template(engine.family), engine.url + "/nowhere")
    with pytest.raises(BadInput, match="engine 'localhost' is not an address; use http://HOST:PORT"):
        check_engine(family_template(engine.family), "localhost")


def _run(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(templates.app, list(args))
    if isinstance(result.exception, Exception) and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


@pytest.mark.parametrize("engine", ["qwen3"], indirect=True)
def test_command(tmp_path: Path, engine: FakeEngine) -> None:
    code, out = _run("list", "--json")
    assert code == 0
    assert [row["family"] for row in orjson.loads(out)] == list(FAMILIES)
    assert "glm4" in _run("list")[1]
    folder = str(write_family_dir(tmp_path / "m", engine.family))
    code, out = _run("check", "--model", folder, "--json")
    report = orjson.loads(out)
    assert (code, report["holds"], report["family"], report["stock_template"]) == (0, True, engine.family, None)
    code, out = _run("check", "--model", folder, "--engine", engine.url)
    assert code == 0
    assert "136 of 136 conversations are append-only" in out
    assert "engine: turn 1: holds" in out
    engine.tamper = lambda reply: reply["prompt_token_ids"].pop()
    code, out = _run("check", "--model", folder, "--engine", engine.url)
    assert code == 1
    assert "BROKEN (the engine reports another prompt" in out
    write_family_dir(tmp_path / "s", "qwen3", STOCK)
    code, out = _run("check", "--model", str(tmp_path / "s"))
    assert code == 0
    assert "the model's own template (not used)" in out
    assert "after a reply it writes '\\n', which no model samples" in out
    with pytest.raises(BadInput, match="no family"):
        _run("check", "--model", folder, "--family", "none")
