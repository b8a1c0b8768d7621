"""The page of `rl360 ledger RUN --attempt ID`: one attempt's life as plain lines, from the plan to the push."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from rl360.report.numbers import DASH, fixed

_WIDTH = 14


def page(life: Mapping[str, Any]) -> str:
    """`life`: what `rl360.report.attempt.attempt_life` found."""
    return "\n".join(_lines(life))


def _lines(life: Mapping[str, Any]) -> Iterator[str]:
    tries, recorded = life["tries"], life["recorded"]
    alone = f", try {tries[0]['try']} alone" if len(tries) < len(recorded) else ""
    yield f"{life['attempt']} of run {life['run']}{alone}"
    yield _line("plan", f"step {life['step']}, wave {life['wave']} of {life['waves']}, group {life['group_id']}")
    yield _line("task", f"{life['task_id']} (domain {life['domain'] or DASH})")
    ended = ", ".join(f"{each['attempt_id']} {each['outcome']}" for each in recorded)
    yield _line("tries", f"{len(recorded)}: {ended}" if recorded else "none is recorded yet")
    for each in tries:
        yield ""
        yield from _try(each)
    yield ""
    yield from _group(life["group"], {each["attempt_id"] for each in tries})
    yield ""
    yield from _step(life["trained"], life["step"])


def _try(each: Mapping[str, Any]) -> Iterator[str]:
    session = each["session"]
    nobody = "its sandbox server gave no reply" if session["opened"] else "no sandbox was asked for"
    status = f"exit status {each['exit_status']}" if each["exit_status"] else f"no exit status ({nobody})"
    yield f"try {each['try']}: {each['attempt_id']}"
    yield _line("outcome", f"{each['outcome']}, {status}, {each['seconds']:.2f} s")
    if each["detail"]:
        yield _line("detail", each["detail"])
    yield _line("time", f"{_when(each['started_at'])} to {_when(each['finished_at'])}")
    yield from _sandbox(each, nobody)
    server = session["server"] or DASH
    yield _line("session", f"server {server}" if session["opened"] else "none was opened")
    sample = session["sample"]
    yield _line("sample", "none is stored" if sample is None else f"{sample['key']}, {sample['bytes']:,} bytes")
    if sample is not None:
        yield _line("", f"sha256 {sample['sha256']}")
    yield from _tokens(each)
    yield from _verdict(each["verdict"])
    yield from _books(each["books"])


def _sandbox(each: Mapping[str, Any], nobody: str) -> Iterator[str]:
    """Its phases, and whether its processes are proven gone; where they are not, where to look."""
    sandbox = each["sandbox"]
    known = any(sandbox["phases_s"].values())  # who speaks for a server that died knows of none
    phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in sandbox["phases_s"].items())
    yield _line(
        "sandbox", phases if known else "how long each phase took is not known" if each["exit_status"] else nobody
    )
    evidence = f": {sandbox['cleanup_evidence']}" if sandbox["cleanup_evidence"] else ""
    if sandbox["cleanup_confirmed"]:
        yield _line("cleanup", f"every process proven gone{evidence}")
    elif not each["exit_status"] and not each["session"]["opened"]:
        yield _line("cleanup", f"nothing to clean up: {nobody}")
    else:
        yield _line("cleanup", f"NOT CONFIRMED{evidence or f': {nobody}'}")
        yield _line("", f"what there is of it now: `rl360 sandboxes list --attempt {each['attempt_id']}`")
        yield _line(
            "", "what the server's next start ended: its log, `left by an earlier server` (`rl360 logs sandbox-0`)"
        )


def _tokens(each: Mapping[str, Any]) -> Iterator[str]:
    metrics = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in each["agent_metrics"].items())
    yield _line("agent", metrics or "reported nothing")
    samples = len(each["leaves"])
    yield _line("turns", f"{each['turns']} in {samples} sample{'' if samples == 1 else 's'}")
    booked = "not decided yet" if each["tokens"] is None else _counts(each["tokens"])
    yield _line("tokens", f"{each['sampled_tokens']:,} sampled: {booked}")
    yield _line("context", _counts(each["context"]))
    yield _line("versions", ", ".join(each["versions"]) or DASH)
    if samples > 1:
        for index, leaf in enumerate(each["leaves"]):
            cut = ", truncated" if leaf["truncated"] else ""
            yield _line(
                f"  sample {index}",
                f"{leaf['bucket'] or 'not decided'}: {leaf['trainable']:,} of {leaf['tokens']:,} under the mask{cut}",
            )


def _verdict(verdict: Mapping[str, Any] | None) -> Iterator[str]:
    if verdict is None:
        yield _line("verdict", "none: it has no reward")
        return
    signed = {True: "signature verifies", False: "SIGNATURE DOES NOT VERIFY", None: "signature not checked, no key"}
    yield _line(
        "verdict", f"reward {verdict['reward']:g} at {_when(verdict['finished_at'])}, {signed[verdict['verifies']]}"
    )
    if verdict["problem"]:
        yield _line("", verdict["problem"])
    yield _line("", f"verifier sha256 {verdict['verifier_digest']}")
    if judge := verdict.get("judge"):
        script = "" if judge["script_reward"] is None else f", after a script's {judge['script_reward']:g}"
        yield _line("judge", f"{judge['model']} at {judge['host']}: score {judge['score']:g}{script}")
        yield _line("", f"answered as {judge['served_model'] or DASH}, reply {judge['reply_id'] or DASH}")
        yield _line("", f"prompt sha256 {judge['prompt_digest']}")


def _books(books: Mapping[str, Any] | None) -> Iterator[str]:
    if books is None:
        yield _line("books", "the filter has not decided yet")
        return
    yield _line("bucket", f"{books['bucket']} (by the {books['from']})")
    weight = books["token_weight"]
    advantage = _signed(books["advantage"])
    if books["advantage"] is None and weight is not None:
        advantage = "each token its own"
    yield _line(
        "advantage",
        f"{advantage}: score {_figure(books['score'])}, baseline {_figure(books['baseline'])} ({books['estimator']})",
    )
    yield _line(
        "loss weight",
        "0: nothing of it trains"
        if weight is None
        else f"{weight:.9g} a token x {books['trained_tokens']:,} trained = {books['loss_weight']:.9g}",
    )


def _group(group: Mapping[str, Any], shown: set[str]) -> Iterator[str]:
    fate = f", {group['fate'].replace('_', ' ')}" if group["fate"] else ""
    yield f"group {group['group_id']}{fate}: mean score {_figure(group['mean_score'])}"
    yield f"    {'attempt':<24}{'outcome':<18}{'bucket':<20}{'reward':>7}{'score':>7}{'baseline':>9}{'advantage':>10}"
    for row in group["members"]:
        mark = "  > " if row["attempt_id"] in shown else "    "
        numbers = f"{_figure(row['reward']):>7}{_figure(row['score']):>7}{_figure(row['baseline']):>9}"
        yield (
            f"{mark}{row['attempt_id']:<24}{row['outcome']:<18}{row['bucket'] or DASH:<20}{numbers}"
            f"{_signed(row['advantage']):>10}"
        )


def _step(trained: Mapping[str, Any] | None, step: int) -> Iterator[str]:
    if trained is None:
        yield f"step {step}: its books are not closed"
        return
    before = trained["version_before"]
    yield f"step {step}: {trained['status']}"
    yield _line(
        "trainer",
        f"{trained['trained_samples']:,} samples, {trained['trained_tokens']:,} tokens, loss weights sum to "
        f"{trained['loss_weight_sum']:.6f}",
    )
    yield _line(
        "",
        f"loss {fixed(trained['loss'], 4)}, gradient norm {fixed(trained['grad_norm'], 3)}, version "
        f"{DASH if before is None else before} to {trained['version_after']}, {trained['seconds']:.2f} s",
    )
    yield _line("batch", f"sha256 {trained['batch_digest'] or DASH}")
    yield _line("weights", f"digest {trained['weights_digest'] or DASH}")
    push = trained["push"]
    yield _line(
        "push",
        "none"
        if push is None
        else f"version {push['version']} by {push['path']} to {push['engines']} engines, {push['bytes']:,} bytes, "
        f"paused {push['paused_s']:.2f} s",
    )


def _line(name: str, text: str) -> str:
    return f"  {name:<{_WIDTH}}{text}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in counts.items()) or "nothing"


def _figure(value: float | None) -> str:
    return DASH if value is None else f"{value:.3f}"


def _signed(value: float | None) -> str:
    return DASH if value is None else f"{value:+.3f}"


def _when(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(unix_s)) + "Z" if unix_s else DASH
