"""Addresses and secrets: each fault is one line that names the file and the fix, and no message shows a secret."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from rl360.config.services import Secrets, Services, home_dir, load_services, service_token
from rl360.errors import BadInput, Rl360Error

SECRETS = {"token": "t0ken-" + "x" * 20, "s3_access_key": "access-key-1", "s3_secret_key": "secret-key-1"}


def write_home(home: Path, mode: int = 0o600, secrets: object = SECRETS) -> Services:
    fields: dict[str, object] = dict.fromkeys(Services.model_fields, "-")
    fields |= {"home": str(home)}
    lists = {name: ["http://127.0.0.1:1"] for name in ("engine_urls", "session_urls", "sandbox_urls")}
    (home / "services.json").write_bytes(orjson.dumps(fields | lists))
    path = home / "secrets.json"
    path.write_bytes(orjson.dumps(secrets))
    path.chmod(mode)
    return load_services(home)


def test_services_and_secrets_are_read(tmp_path: Path) -> None:
    services = write_home(tmp_path)
    assert services.secrets().s3_access_key == "access-key-1"
    assert services.auth_headers() == {"Authorization": f"Bearer {SECRETS['token']}"}


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660, 0o601])
def test_secrets_that_others_can_read_are_refused(tmp_path: Path, mode: int) -> None:
    services = write_home(tmp_path, mode)
    with pytest.raises(Rl360Error, match=f"mode {mode:o}.*chmod 600"):
        services.secrets()


@pytest.mark.parametrize("secrets", [[], {}, SECRETS | {"token": "short"}, SECRETS | {"more": 1}, "x"])
def test_what_is_no_secrets_file_is_refused_without_showing_it(tmp_path: Path, secrets: object) -> None:
    services = write_home(tmp_path, secrets=secrets)
    with pytest.raises(Rl360Error, match="is not a secrets file") as error:
        services.secrets()
    shown = str(error.value) + repr(error.value.__cause__)
    for secret in ("access-key-1", "secret-key-1", "t0ken-", "short"):
        assert secret not in shown


def test_a_missing_file_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(Rl360Error, match="run `rl360 up` first, or set RL360_HOME"):
        load_services(tmp_path)
    with pytest.raises(Rl360Error, match=r"cannot read /dev/null/x/services\.json"):
        load_services(Path("/dev/null/x"))
    services = write_home(tmp_path)
    (Path(services.home) / "secrets.json").unlink()
    with pytest.raises(Rl360Error, match="start the services with `rl360 up`"):
        services.secrets()


@pytest.mark.parametrize(
    ("data", "words"),
    [(b"{", "column"), (b"[]", "valid dictionary"), (b"{}", "gateway_url: Field"), (b'{"hom": 1}', "unknown key hom")],
)
def test_what_is_no_services_file_is_one_line(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "services.json").write_bytes(data)
    with pytest.raises(BadInput, match=f"not a services file .*{words}") as error:
        load_services(tmp_path)
    assert "\n" not in str(error.value)


def test_secrets_are_in_no_representation() -> None:
    secrets = Secrets.model_validate(SECRETS)
    for shown in (repr(secrets), str(secrets), f"{secrets}"):
        for value in SECRETS.values():
            assert value not in shown


def test_home_is_absolute_and_may_be_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RL360_HOME", raising=False)
    assert home_dir() == tmp_path / ".rl360"
    monkeypatch.setenv("RL360_HOME", "elsewhere")
    assert home_dir() == tmp_path / "elsewhere"


def test_a_service_needs_its_token_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RL360_TOKEN_FILE", raising=False)
    monkeypatch.setenv("RL360_HOME", str(tmp_path / "home"))
    with pytest.raises(Rl360Error, match=r"home/token, which `rl360 up` writes, .*--token-file"):
        service_token()
    monkeypatch.setenv("RL360_TOKEN_FILE", str(tmp_path / "token"))
    with pytest.raises(Rl360Error, match=r"cannot read the token .*token"):
        service_token()
    (tmp_path / "token").write_text("too short\n")
    (tmp_path / "token").chmod(0o640)
    with pytest.raises(Rl360Error, match=r"readable by others \(mode 640\); run `chmod 600 .*token`"):
        service_token()
    (tmp_path / "token").chmod(0o600)
    with pytest.raises(Rl360Error, match="is 9 characters, need at least 16"):
        service_token()
    (tmp_path / "token").write_text("x" * 16 + "\n")
    assert service_token() == "x" * 16
    (tmp_path / "home").mkdir()
    for name, letter in (("home/token", "h"), ("named", "n")):
        (tmp_path / name).write_text(letter * 16)
        (tmp_path / name).chmod(0o600)
    assert service_token(tmp_path / "named") == "n" * 16
    monkeypatch.delenv("RL360_TOKEN_FILE")
    assert service_token() == "h" * 16
