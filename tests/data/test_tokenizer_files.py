"""A folder's tokenizer is what transformers makes of all its files: ids of prompts are those of
`apply_chat_template`."""

import json

import pytest
from tests.support.byte_tokenizer import byte_tokenizer
from tokenizers import AddedToken
from transformers import AutoTokenizer

from expertmesh.errors import ConfigError
from expertmesh.text.chat import TemplateFormat
from expertmesh.text.format import extras_of, hub_files, text_format
from expertmesh.text.tokenizer import ids_of_text, load_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NAMES = ("bos_token", "eos_token", "pad_token", "image_token", "blank")
SHOWN = "".join(f"{{% if {name} is defined %}}[{{{{ {name} }}}}]{{% endif %}}" for name in NAMES)
TEXT = "a <s> b<s>c <plain> d <new>e <newer> f"
TEMPLATE = SHOWN + TEXT + CHATML
MAP, CONFIG, ADDED = "special_tokens_map.json", "tokenizer_config.json", "added_tokens.json"
JINJA, TOOLS = "chat_template.jinja", "additional_chat_templates/tool_use.jinja"
ASKED = [{"role": "user", "content": "hi  there"}]
CALLS = [{"type": "function", "function": {"name": "f"}}]


def token(content, *, typed=False, **flags):
    """A token as an object, in tokenizer_config.json with its type."""
    plain = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {"content": content, **plain, **flags} | ({"__type": "AddedToken"} if typed else {})


def decoder(**flags):
    return {CONFIG: {"added_tokens_decoder": {"259": token("<s>", special=True, **flags)}}}


FOLDERS = {
    "no file": {},
    "bos in the map": {MAP: {"bos_token": "<s>", "eos_token": "<|im_end|>"}},
    "bos there as an object": {MAP: {"bos_token": token("<s>")}},
    "bos in the map changes its flags": {MAP: {"bos_token": token("<new>", lstrip=True)}},
    "the map replaces the configuration": {
        CONFIG: {"bos_token": "<|im_end|>"},
        MAP: {"bos_token": "<s>"},
    },
    "the map takes a token away": {CONFIG: {"bos_token": "<s>"}, MAP: {"bos_token": None}},
    "the map is no longer read": {
        CONFIG: {**decoder()[CONFIG], "bos_token": "<|im_end|>"},
        MAP: {"bos_token": "<s>"},
    },
    "a name of the model's own": {CONFIG: {"image_token": "<plain>"}},
    "such a name in both": {CONFIG: {"image_token": "<plain>"}, MAP: {"image_token": "<s>"}},
    "named extra tokens": {CONFIG: {"extra_special_tokens": {"image_token": "<new>", "blank": "<s>"}}},
    "named extra tokens of the map": {MAP: {"extra_special_tokens": {"image_token": "<s>"}}},
    "a list of extra tokens": {CONFIG: {"extra_special_tokens": ["<new>", "<newer>"]}},
    "by its former name": {CONFIG: {"additional_special_tokens": ["<newer>", "<new>"]}},
    "such a list in the map": {MAP: {"additional_special_tokens": ["<newer>", "<new>"]}},
    "and by its new name": {MAP: {"extra_special_tokens": [token("<newer>", lstrip=True), "<new>"]}},
    "a typed token": {CONFIG: {"pad_token": token("<new>", typed=True, rstrip=True)}},
    "flags of the decoder": decoder(rstrip=True),
    "other flags of the decoder": decoder(lstrip=True),
    "whole words of the decoder": decoder() | decoder(single_word=True),
    "a token of the decoder that is new": {
        CONFIG: {"added_tokens_decoder": {"261": token("<new>", special=True)}}
    },
    "older added tokens": {ADDED: {"<new>": 261, "<newer>": 262}, MAP: {"pad_token": "<newer>"}},
    "flags that a tokenizer.json decides": {CONFIG: {"bos_token": "<s>", "add_bos_token": True}},
    "special tokens as text": {CONFIG: {"split_special_tokens": True, "bos_token": "<s>"}},
    "a file of the template": {CONFIG: {"chat_template": "no"}, JINJA: TEMPLATE},
    "a file for tools": {JINJA: TEMPLATE, TOOLS: "{{ tools|length }}" + TEMPLATE},
    "a template for tools alone": {TOOLS: "{{ tools|length }}" + TEMPLATE},
    "a list of templates": {
        CONFIG: {
            "chat_template": [
                {"name": "default", "template": TEMPLATE},
                {"name": "tool_use", "template": "{{ tools|length }}" + TEMPLATE},
            ]
        }
    },
    "templates by name": {CONFIG: {"chat_template": {"default": TEMPLATE, "rag": "no"}}},
    "a template of the images' processor": {"chat_template.json": {"chat_template": "no"}},
}  # fmt: skip


def folder_of(path, files):
    """A folder of the hub with a tokenizer of special tokens and a plain one, and these files."""
    tokenizer = byte_tokenizer(("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"))
    tokenizer.add_tokens([AddedToken("<plain>", special=False, normalized=False)])
    path.mkdir(exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    files = dict(files)
    has_template = JINJA in files or TOOLS in files or "chat_template" in files.get(CONFIG, {})
    own = {"tokenizer_class": "PreTrainedTokenizerFast"}
    own |= {} if has_template else {"chat_template": TEMPLATE}
    files[CONFIG] = own | files.get(CONFIG, {})
    for name, values in {"config.json": {"model_type": "mixtral"}, **files}.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(values if isinstance(values, str) else json.dumps(values))
    return path


def ours(path, messages=ASKED, tools=None, *, asks=True, **variables):
    """Tokens of a conversation, with tools as training has them."""
    file = path / "tokenizer.json"
    form = text_format(load_tokenizer(file), file).chat
    text = form._render(messages, tools, asks=asks, variables=variables)
    return ids_of_text(form._tokenizer, text)


def theirs(path, messages=ASKED, tools=None, **options):
    made = AutoTokenizer.from_pretrained(path)
    options = {"add_generation_prompt": True, "tools": tools, "return_dict": False} | options
    return list(made.apply_chat_template(messages, **options))


@pytest.mark.parametrize("tools", [None, CALLS], ids=["", "tools"])
@pytest.mark.parametrize("name", FOLDERS)
def test_prompts_have_the_ids_of_transformers(tmp_path, name, tools):
    path = folder_of(tmp_path / "hub", FOLDERS[name])
    if tools is None and name == "a template for tools alone":
        with pytest.raises(ConfigError, match="has chat templates named tool_use, and none is"):
            ours(path)
        return
    assert ours(path, tools=tools) == theirs(path, tools=tools)
    # and so does a run that keeps the files
    (run := tmp_path / "run").mkdir()
    (run / "tokenizer.json").write_bytes((path / "tokenizer.json").read_bytes())
    for kept in (hub_files(path), extras_of(path / "tokenizer.json")):
        for target, source in kept.items():
            (run / target).parent.mkdir(parents=True, exist_ok=True)
            (run / target).write_bytes(source.read_bytes())
        assert ours(run, tools=tools) == ours(path, tools=tools)
    assert extras_of(run / "tokenizer.json").keys() >= extras_of(path / "tokenizer.json").keys()


GIVEN = {
    # template, messages, further variables
    "documents are none": ("{% if documents is none %}[NO]{% endif %}", ASKED, {}),
    "documents that are given": ("{{ documents[0].title }}", ASKED, {"documents": [{"title": "t"}]}),
    "tools are none": ("{% if tools is none %}[NO]{% else %}{{ tools|length }}{% endif %}", ASKED, {}),
    "whether an answer is asked": ("{{ add_generation_prompt is defined }}", ASKED, {}),
    "null is not said": ("{{ messages[0].name is defined }}", [{**ASKED[0], "name": None}], {}),
    "reasoning by its former name": (
        "{{ messages[0].reasoning_content }}{{ messages[0].thinking }}",
        [{**ASKED[0], "reasoning": "r"}],
        {},
    ),
    "thoughts": ("{{ messages[0].reasoning_content }}", [{**ASKED[0], "thinking": "r"}], {}),
    "the first of them": (
        "{{ messages[0].reasoning_content }}{{ messages[0].thinking }}{{ messages[0].reasoning }}",
        [{**ASKED[0], "reasoning": "r", "thinking": "t", "reasoning_content": "c"}],
        {},
    ),
    "arguments of tojson": ("{{ messages[0]|tojson(true, 2) }}{{ {'b': 1, 'a': 'ä<'}|tojson(sort_keys=true) }}", ASKED, {}),  # noqa: E501
    "separators of tojson": ("{{ messages|tojson(separators=(',', ':')) }}", ASKED, {}),
    "loop controls": ("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", ASKED, {}),
    "generation": ("a {% generation %} b {% endgeneration %} c", ASKED, {}),
    "blanks of blocks": ("a\n  {% if true %}\n  b\n  {% endif %}\nc\n", ASKED, {}),
    "a dict": ("{{ dict(a=1).a }}{{ dict.fromkeys(['a'], 2).a }}", ASKED, {}),
    "a namespace": ("{% set n = namespace(a=1) %}{% set n.a = 2 %}{{ n.a }}", ASKED, {}),
    "a token that is overridden": ("{{ bos_token }}", ASKED, {"bos_token": "<s>"}),
    "an unknown token of a plain tokenizer": ("{{ cls_token }}", ASKED, {}),
}  # fmt: skip


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("name", GIVEN)
def test_a_template_gets_what_transformers_gives_it(tmp_path, name, asks):
    template, messages, variables = GIVEN[name]
    path = folder_of(tmp_path, {CONFIG: {"chat_template": template + CHATML}})
    assert ours(path, messages, asks=asks, **variables) == theirs(
        path, messages, add_generation_prompt=asks, **variables
    )


CLASSES = {
    # what the configuration says, and whether the template may write its begin token
    "a class of its own": ({"tokenizer_class": "LlamaTokenizer"}, False),
    "no class": ({"tokenizer_class": None}, False),
    "null": ({"tokenizer_class": "LlamaTokenizer", "bos_token": None}, True),
    "named": ({"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>"}, True),
    "a plain class": ({"tokenizer_class": "TokenizersBackend"}, True),
}
USES = {
    "{{ bos_token }}": False,
    "{{ bos_token ~ 'a' }}": False,
    "{% if bos_token %}a{% endif %}": False,
    "{{ [bos_token]|join }}": False,
    "{% if bos_token is defined %}{{ bos_token }}{% endif %}": True,
    "{{ bos_token|default('a') }}": True,
    "{{ messages[0].bos_token }}{{ other }}": True,
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", CLASSES)
def test_a_token_that_no_file_names_is_never_nothing_in_silence(tmp_path, name, use):
    """Classes of transformers have tokens of their own by default, which no file tells."""
    config, is_known = CLASSES[name]
    path = folder_of(tmp_path, {CONFIG: {**config, "chat_template": use + CHATML}})
    if is_known or USES[use]:
        assert ours(path)
    else:
        with pytest.raises(ConfigError, match="no file of the tokenizer names bos_token; name it"):
            ours(path)


def test_a_token_without_room_in_the_model_is_left_out(tmp_path):
    path = folder_of(tmp_path, {CONFIG: {"extra_special_tokens": ["<new>", "<newer>"]}})
    whole, cut = (load_tokenizer(path / "tokenizer.json", vocab_size=v) for v in (None, 262))
    assert [whole.token_to_id(t) for t in ("<new>", "<newer>")] == [261, 262]
    assert [cut.token_to_id(t) for t in ("<new>", "<newer>")] == [261, None]


def test_the_end_of_a_text_is_named_by_any_of_the_files(tmp_path):
    tokenizer = byte_tokenizer(("<stop>",))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / MAP).write_text(json.dumps({"eos_token": token("<stop>")}))
    text = text_format(load_tokenizer(tmp_path / "tokenizer.json"), tmp_path / "tokenizer.json")
    assert text.end_ids == (tokenizer.token_to_id("<stop>"),)


def test_a_changed_template_for_tools_is_another_format():
    tokenizer = byte_tokenizer(("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    named = [TemplateFormat(tokenizer, CHATML, {}, with_tools=t).identity for t in (None, "a", "b")]
    assert len({*named}) == 3
