"""Adapters behind the server's door and the verb: chosen by name, listed, counted, and refused in a line."""

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import openai
import pytest
from tests.support.adapters import make_adapter
from tests.support.serving import events, served

import expertmesh as em
from expertmesh.cli.main import main
from expertmesh.serve.answer import _as_fault

PROMPT = "def main("
ASKED = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def adapters(folder, tmp_path_factory):
    config = em.Engine(folder).model.config
    place = tmp_path_factory.mktemp("adapters")
    return {
        "poems": str(make_adapter(place / "poems", config, seed=1)),
        "code": str(make_adapter(place / "code, later", config, seed=2, modules=("v_proj",))),
    }


@pytest.fixture(scope="module")
def address(folder, adapters):
    words = [f"{name}={place}" for name, place in adapters.items()]
    with served(folder, "--adapter", words[0], "--adapter", words[1]) as found:
        yield found.address


@pytest.fixture(scope="module")
def client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as one:
        yield one


def text_of(engine, adapter):
    params = em.SamplingParams(temperature=0, max_tokens=8)
    return engine.generate(PROMPT, params, adapter=adapter)[0].text


def test_a_request_chooses_by_its_model(client, address, folder, adapters):
    engine = em.Engine(folder, adapters=adapters)
    cards = client.models.list().data
    assert [(card.id, getattr(card, "parent", None)) for card in cards] == [
        ("tiny", None),
        ("poems", "tiny"),
        ("code", "tiny"),
    ]
    assert client.models.retrieve("poems").parent == "tiny"
    texts = {}
    for name in ("poems", "tiny", "code", "poems"):
        found = client.completions.create(model=name, **ASKED)
        adapter = None if name == "tiny" else name
        assert (found.model, found.choices[0].text) == (name, text_of(engine, adapter))
        texts[name] = found.choices[0].text
    assert len(set(texts.values())) == 3
    said = [{"role": "user", "content": PROMPT}]
    whole = client.chat.completions.create(model="poems", messages=said, max_tokens=4, seed=1)
    with httpx2.stream(
        "POST",
        f"{address}/v1/chat/completions",
        json={"model": "poems", "messages": said, "max_tokens": 4, "seed": 1, "stream": True},
    ) as answer:
        found, is_whole = events(list(answer.iter_lines()))
    assert is_whole and {one["model"] for one in found} == {"poems"}
    pieces = "".join(one["choices"][0]["delta"].get("content", "") for one in found)
    assert pieces == whole.choices[0].message.content
    counted = httpx2.get(f"{address}/metrics").text
    assert 'expertmesh:adapter_requests_total{adapter="poems",model_name="tiny"} 4.0' in counted
    assert 'expertmesh:adapter_requests_total{adapter="code",model_name="tiny"} 1.0' in counted


def test_an_unknown_name_is_404(client):
    line = "there is no 'songs'; this server has 'tiny', 'poems', 'code'"
    with pytest.raises(openai.NotFoundError, match=line):
        client.completions.create(model="songs", **ASKED)
    with pytest.raises(openai.NotFoundError, match=line):
        client.models.retrieve("songs")


def test_wrong_adapters_of_the_server_are_one_line(folder, adapters, tmp_path, capsys):
    poems = adapters["poems"]
    for words, said in (
        (["poems"], "--adapter poems: each must be NAME=DIR; write a name"),
        ([f"={poems}"], "each must be NAME=DIR"),
        ([f"a={poems}", f"a={poems}"], ": names must differ"),
        (
            [f"tiny={poems}"],
            "--adapter tiny: is the name of the model itself; choose another, or set --mo",
        ),
        ([f"a={tmp_path}"], f"--adapter a={tmp_path}: has no readable adapter_config.json"),
    ):
        assert main(["serve", str(folder), "--port", "0", "--adapter", *words]) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1, error


def test_the_verb_answers_with_one(folder, adapters, tmp_path, capsys):
    engine = em.Engine(folder, adapters=adapters)
    words = [str(folder), "--greedy", "--max-tokens", "8"]
    for name, place in adapters.items():
        assert main(["generate", *words, "--adapter", place, PROMPT]) == 0
        assert capsys.readouterr().out == PROMPT + text_of(engine, name) + "\n"
    (tmp_path / "asked.txt").write_text(f"{PROMPT}\nimport os\n")
    many = ["--input", str(tmp_path / "asked.txt"), "--adapter", adapters["code"]]
    assert main(["generate", *words, *many]) == 0
    assert PROMPT + text_of(engine, "code") in capsys.readouterr().out
    assert main(["generate", *words, "--adapter", str(tmp_path), PROMPT]) == 2
    error = capsys.readouterr().err
    assert f"--adapter {tmp_path}: has no readable adapter_config.json" in error and error.count("\n") == 1


def test_adapters_come_and_go_while_the_server_runs(folder, adapters):
    root = Path(adapters["poems"]).parent
    engine = em.Engine(folder, adapters=adapters)
    with served(folder, "--adapter-root", str(root)) as found:

        def post(path, **body):
            return httpx2.post(f"{found.address}/v1/{path}", json=body, timeout=60)

        loaded = post("load_lora_adapter", lora_name="poems", lora_path="poems")
        assert (loaded.status_code, loaded.text) == (
            200,
            "Success: LoRA adapter 'poems' added successfully.",
        )
        whole = post("load_lora_adapter", lora_name="code", lora_path=adapters["code"])
        assert whole.status_code == 200
        for name in adapters:
            text = post("completions", model=name, **ASKED).json()["choices"][0]["text"]
            assert text == text_of(engine, name)
        long = ASKED | {"max_tokens": 300, "ignore_eos": True, "stream": True, "model": "poems"}
        with httpx2.stream("POST", f"{found.address}/v1/completions", json=long) as answer:
            lines = answer.iter_lines()
            next(lines)
            with ThreadPoolExecutor(1) as pool:
                going = pool.submit(post, "unload_lora_adapter", lora_name="poems")
                while "poems" in httpx2.get(f"{found.address}/v1/models").text:
                    time.sleep(0.01)
                refused = post("completions", model="poems", **ASKED)
                assert refused.status_code == 404
                rest, is_whole = events([*lines])
                assert is_whole and rest[-1]["choices"][0]["finish_reason"] == "length"
                assert going.result().text == "Success: LoRA adapter 'poems' removed successfully."
        again = post("load_lora_adapter", lora_name="poems", lora_path="poems")
        assert again.status_code == 200
        outside = root.parent / "outside"
        shutil.copytree(adapters["poems"], outside)
        (root / "link").symlink_to(outside)
        (root / "empty").mkdir()
        (root / "looped").mkdir()
        (root / "looped" / "itself").symlink_to(root / "looped" / "itself")
        for path, body, status, said in (
            ("load", {"lora_name": "poems", "lora_path": "poems"}, 400, "is loaded already"),
            ("load", {"lora_name": "tiny", "lora_path": "poems"}, 400, "is loaded already"),
            ("load", {"lora_name": "a", "lora_path": "../outside"}, 400, "must be a folder below"),
            ("load", {"lora_name": "a", "lora_path": str(outside)}, 400, "must be a folder below"),
            ("load", {"lora_name": "a", "lora_path": "link"}, 400, "must be a folder below"),
            ("load", {"lora_name": "a", "lora_path": "/etc/passwd"}, 400, "must be a folder below"),
            ("load", {"lora_name": "a", "lora_path": "none\x00"}, 400, "must be a folder below"),
            ("load", {"lora_name": "a", "lora_path": "none"}, 400, "must be a folder below"),
            ("load", {"lora_name": "a", "lora_path": "empty"}, 400, "no readable adapter_config"),
            ("load", {"lora_name": "a", "lora_path": "looped"}, 400, "no readable adapter_config"),
            ("load", {"lora_name": "", "lora_path": "poems"}, 400, "lora_name"),
            ("load", {"lora_name": "a"}, 400, "lora_path"),
            (
                "load",
                {"lora_name": "a", "lora_path": "poems", "load_inplace": True},
                400,
                "load_in",
            ),
            ("unload", {"lora_name": "tiny"}, 400, "is the model itself"),
            ("unload", {"lora_name": "a"}, 404, "there is no 'a'"),
            ("unload", {"lora_name": "code", "lora_int_id": 1}, 400, "lora_int_id"),
        ):
            wrong = post(f"{path}_lora_adapter", **body)
            message = wrong.json()["error"]["message"]
            assert (wrong.status_code, said in message, "\n" in message) == (status, True, False), (
                body,
                message,
            )


def test_adapters_stay_unless_an_option_allows_it(server):
    for path in ("load", "unload"):
        body = {"lora_name": "a", "lora_path": "poems"}
        found = httpx2.post(f"{server.address}/v1/{path}_lora_adapter", json=body)
        assert found.status_code == 403 and "--adapter-root" in found.text


@pytest.mark.parametrize("others", [[], ["code"]], ids=["the last", "one of two"])
def test_an_adapter_that_is_unloaded_while_a_request_is_read_is_404(folder, adapters, others):
    engine = em.Engine(folder, num_blocks=8, adapters={name: adapters[name] for name in others})
    with pytest.raises(em.ConfigError) as gone:
        engine.add(PROMPT, adapter="poems")
    fault = _as_fault(gone.value)
    assert (fault.status, fault.param, fault.body["error"]["code"]) == (404, "model", "model_not_found")
