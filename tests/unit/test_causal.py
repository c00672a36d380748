"""Text as it is written here, in padded prompts and buffers of one size, is the text that transformers writes."""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from _train_text_weights import learn_tokenizer
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MambaConfig, MistralConfig
from transformers.models.llama.modeling_llama import LlamaAttention

from warmstart.models import ModelError, Request, RequestError, causal, family
from warmstart.models.causal import CausalModel, _Stopping

ROOM = 48
PREFILLS = (1, 4, 16)
SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA = LlamaConfig(**SIZES, intermediate_size=64, max_position_embeddings=64)
# Every second key is out of sight from token 8 on.
MISTRAL = MistralConfig(**SIZES, intermediate_size=64, max_position_embeddings=64, sliding_window=8)
GPT2 = GPT2Config(n_embd=32, n_layer=3, n_head=4, n_positions=64)
MAMBA = MambaConfig(hidden_size=32, num_hidden_layers=2, state_size=4)
PROMPTS = ["", "a", "one two", "héllo, 漢字 🎉!"]


def saved(place: Path, config: Any) -> Path:
    """A model with large random weights, so that its likeliest tokens differ from step to step."""
    tokenizer = learn_tokenizer(["one two three four", "héllo"])
    config = type(config).from_dict(
        config.to_dict() | {"vocab_size": len(tokenizer), "bos_token_id": 0, "eos_token_id": None, "pad_token_id": None}
    )
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    model.generation_config.eos_token_id = None
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


def planned(prefills: Sequence[int] = PREFILLS, room: int = ROOM) -> list[Request]:
    lengths = {"prompt": "", "cache_tokens": room, "max_new_tokens": 2}
    return [Request(f"up to {prefill}", {"prefill": prefill, **lengths}) for prefill in prefills]


def ask(prompt: str, tokens: int = 20, temperature: float = 0.0, seed: int = 0, **more: Any) -> Request:
    inputs = {"prompt": prompt, "max_new_tokens": tokens, "temperature": temperature, **more}
    return Request("by its length", inputs, seeds=(seed,))


def load(place: Path, plan: Sequence[Request] | None = None) -> CausalModel:
    return CausalModel(str(place), device="cpu", dtype="float32", plan=plan or planned())


def as_transformers_has_it(model: CausalModel, place: Path, prompt: str, tokens: int) -> str:
    """The text by transformers' own loop, without padding, with its own growing cache."""
    plain = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    given = torch.tensor([model._tokenizer(prompt)["input_ids"]])
    made = plain.generate(
        given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=tokens, eos_token_id=0
    )
    text: str = model._tokenizer.decode(made[0, given.shape[1] :], skip_special_tokens=True)
    return text.rstrip("\ufffd")  # a last character that is not complete


@pytest.fixture(autouse=True)
def as_served() -> Iterator[None]:
    """The mode in which every request runs."""
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("models") / "llama", LLAMA)


@pytest.fixture
def llama(llama_dir: Path) -> CausalModel:
    return load(llama_dir)


@pytest.mark.parametrize("config", [LLAMA, MISTRAL, GPT2], ids=["llama", "mistral", "gpt2"])
def test_the_likeliest_text_is_the_one_that_transformers_writes(tmp_path: Path, config: Any) -> None:
    place = saved(tmp_path / "model", config)
    model = load(place)
    texts = []
    for prompt in PROMPTS:
        text = "".join(model.stream(ask(prompt, 24)))
        assert text == as_transformers_has_it(model, place, prompt, 24)
        texts.append(text)
    assert len({text[:8] for text in texts}) == len(PROMPTS)


def test_a_model_may_compute_with_the_numbers_of_its_layers(
    llama_dir: Path, llama: CausalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = LlamaAttention.forward

    def numbered(self: Any, *args: Any, **kwargs: Any) -> Any:
        states, weights = forward(self, *args, **kwargs)
        return states * (2 * self.layer_idx + 1), weights

    usual = llama.run(ask("one two"))
    monkeypatch.setattr(LlamaAttention, "forward", numbered)
    model = load(llama_dir)
    text = "".join(model.stream(ask("one two")))
    assert [text] != usual
    assert text == as_transformers_has_it(model, llama_dir, "one two", 20)


def test_a_layer_that_is_run_twice_writes_the_same(llama: CausalModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the self-check runs it, and a call that is repeated uncompiled."""
    right = llama.run(ask("one two"))
    kind = type(llama.parts()["model"].model.layers[0])
    forward: Callable[..., Any] = kind.forward

    def twice(*args: Any, **kwargs: Any) -> Any:
        forward(*args, **kwargs)
        return forward(*args, **kwargs)

    monkeypatch.setattr(kind, "forward", twice)
    assert llama.run(ask("one two")) == right


def test_a_seed_means_a_text_and_another_seed_another(llama: CausalModel) -> None:
    one, again, other = (llama.run(ask("a", temperature=1.0, seed=seed)) for seed in (1, 1, 2))
    assert one == again != other
    # The likeliest token alone has this much.
    assert llama.run(ask("a", temperature=1.0, top_p=1e-6)) == llama.run(ask("a"))


def test_texts_that_are_written_at_once_are_those_written_alone(llama: CausalModel) -> None:
    asked = [ask("one two", temperature=1.0, seed=seed) for seed in range(3)]
    alone = [list(llama.stream(request)) for request in asked]
    streams = [llama.stream(request) for request in asked]
    together = [[piece for piece in pieces if piece is not None] for pieces in zip(*zip_longest(*streams), strict=True)]
    assert together == alone
    assert sum(len(pieces) > 5 for pieces in alone) > 1


def test_buffers_are_used_again_also_after_a_text_that_was_left_off(llama: CausalModel) -> None:
    right = llama.run(ask("one two"))
    [first] = llama._free
    next(llama.stream(ask("héllo")))
    # The one that was left off kept its own to itself.
    assert llama._free == []
    assert llama.run(ask("one two")) == right
    assert llama.run(ask("a"))
    assert len(llama._free) == 1
    assert llama._free[0] is not first


def test_no_character_is_cut(llama: CausalModel, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "héllo, 漢字 🎉 ✓"
    tokens = iter(llama._tokenizer(text, add_special_tokens=False)["input_ids"])
    monkeypatch.setattr(causal, "_chooser", lambda request: lambda logits: next(tokens, -1))
    monkeypatch.setattr(llama, "_ends", frozenset([-1]))
    pieces = list(llama.stream(ask("", tokens=40)))
    assert "".join(pieces) == text
    assert [piece for piece in pieces if "\ufffd" in piece] == []
    assert "" in pieces  # a token that is part of a character


def test_what_ends_a_text_is_not_part_of_it(llama: CausalModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causal, "_chooser", lambda request: lambda logits: 7)
    assert llama._ends == {0}
    monkeypatch.setattr(llama, "_ends", frozenset([7]))
    assert llama.run(ask("a")) == [""]
    # A planned request has to take every step, or the graph of the next one would not be made.
    assert len(list(llama.stream(planned()[0]))) == 2


def stopped(text: str, stops: Sequence[str]) -> str:
    """The text before the string among some that is complete first, by trying each length."""
    for end in range(1, len(text) + 1):
        if whole := [stop for stop in stops if stop and text[:end].endswith(stop)]:
            return text[: end - max(map(len, whole))]
    return text


@pytest.mark.parametrize(
    "stops", [(), ("",), ("b",), ("ab", "bc"), ("aab", "ba"), ("abcab",), ("aaa", "aac", "c"), ("b", "abb")]
)
def test_a_text_ends_before_what_stops_it_wherever_its_pieces_part(stops: Sequence[str]) -> None:
    choose = random.Random(0)
    for _ in range(200):
        pieces = ["".join(choose.choices("abc", k=choose.randrange(4))) for _ in range(8)]
        stopping, got = _Stopping(stops), ""
        for number, piece in enumerate(pieces):
            got += stopping.add(piece, last=number == 7)
            assert stopped("".join(pieces[: number + 1]), stops).startswith(got)
            if stopping.stopped:
                break
        assert (got, stopping.held) == (stopped("".join(pieces), stops), "")


def test_what_stops_a_text_is_not_part_of_it_and_its_buffers_are_used_again(llama: CausalModel) -> None:
    [text] = llama.run(ask("one two"))
    for stop in (text[7], text[7:12], text[-1:], text):
        assert llama.run(ask("one two", stop=["not in it", stop])) == [text[: text.index(stop)]]
    assert len(llama._free) == 1


def test_what_only_began_as_a_stop_is_given_when_the_text_ends(
    llama: CausalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    [text] = llama.run(ask("one two"))
    assert llama.run(ask("one two", stop=[text[-2:] + "and more"])) == [text]
    # The model's own end, at which nothing more comes.
    pieces = list(llama.stream(ask("one two")))
    numbers = [llama._tokenizer.encode(piece, add_special_tokens=False) for piece in pieces]
    end = next(found for found in numbers[5:] if len(found) == 1 and found not in numbers[:5])
    monkeypatch.setattr(llama, "_ends", frozenset(end))
    [ended] = llama.run(ask("one two"))
    assert ended
    assert llama.run(ask("one two", stop=[ended[-2:] + "and more"])) == [ended]


TEMPLATE = (
    "{% for message in messages %}{% if message.role not in ('user', 'assistant') %}"
    "{{ raise_exception('only users speak here') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_messages_are_put_as_the_model_was_taught(llama_dir: Path) -> None:
    messages = [{"role": "user", "content": "one"}]
    llama = load(llama_dir, planned((1, 32)))
    llama._tokenizer.chat_template = TEMPLATE
    given = llama._tokenizer("<user>one<assistant>", add_special_tokens=False)["input_ids"]
    asked = Request("by its length", {"messages": messages, "max_new_tokens": 4})
    assert llama._numbers(asked) == given
    assert llama.run(asked) != llama.run(ask("one", 4))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"stop": "with"}, "stop is 'with'; give a list of strings"),
    ({"stop": None}, "stop is None"),
    ({"stop": [5]}, r"stop is \[5\]"),
    ({"prompt": 5}, "the prompt is 5, which is no text"),
    ({"prompt": ["a", "b"]}, "which is no text"),
    ({"prompt": "\ud800 a"}, "a string of whole characters"),
    ({"prompt": None}, "neither prompt nor messages, or both"),
    ({"messages": [{"role": "user", "content": "a"}]}, "neither prompt nor messages, or both"),
    ({"prompt": None, "messages": ["one"]}, r"messages are \['one'\]; give a list, each with role and content"),
    ({"prompt": None, "messages": iter([])}, "give a list"),
    ({"prompt": None, "messages": [{"role": "user"}]}, "each with role and content"),
    ({"max_new_tokens": 0}, "max_new_tokens is 0; give a number of at least 1"),
    ({"max_new_tokens": "x"}, "max_new_tokens is 'x'"),
    ({"temperature": -1}, "temperature is -1; give a number of at least 0"),
    ({"temperature": float("nan")}, "temperature is nan"),
    ({"top_p": None}, "top_p is None; give a number from 0 to 1"),
]


@pytest.mark.parametrize(("inputs", "told"), REFUSED, ids=range(len(REFUSED)))
def test_an_input_that_cannot_be_used_is_refused_by_its_name(
    llama: CausalModel, inputs: dict[str, Any], told: str
) -> None:
    with pytest.raises(RequestError, match=told):
        llama.run(Request("by its length", {"prompt": "one", "max_new_tokens": 4, **inputs}))


def test_a_planned_request_takes_its_steps_whatever_stops_a_text(llama: CausalModel) -> None:
    [plan, *_] = planned()
    inputs = {**plan.inputs, "max_new_tokens": 20}
    [text] = llama.run(Request(plan.label, inputs))
    assert len(text) > 1
    assert llama.run(Request(plan.label, inputs | {"stop": [text[:1]]})) == [text]


def test_messages_that_the_template_refuses_are_refused_with_its_words(llama: CausalModel) -> None:
    messages = [{"role": "judge", "content": "one"}]
    llama._tokenizer.chat_template = TEMPLATE
    with pytest.raises(RequestError, match="the model's chat template refuses these messages"):
        llama.run(Request("by its length", {"messages": messages, "max_new_tokens": 4}))


def test_messages_for_a_model_without_a_chat_template_are_refused(llama: CausalModel) -> None:
    with pytest.raises(RequestError, match=r"no chat template.*ask with a prompt"):
        llama.run(Request("by its length", {"messages": [], "max_new_tokens": 4}))


def test_a_request_is_a_case_of_the_shortest_planned_length_that_holds_it(llama: CausalModel) -> None:
    def label(tokens: int) -> str:
        return llama.label(ask("7" * (tokens - 1)))  # each prompt begins with one token of its own

    assert [label(tokens) for tokens in (1, 2, 4, 5, 16)] == [f"up to {n}" for n in (1, 4, 4, 16, 16)]
    assert [llama.label(request) for request in planned()] == [f"up to {n}" for n in PREFILLS]
    with pytest.raises(RequestError, match=r"the prompt has 17 tokens, and the longest .* has 16; shorten it, or plan"):
        label(17)


def test_a_text_may_fill_the_room_and_no_more(llama: CausalModel) -> None:
    assert len(list(llama.stream(ask("7" * 7, tokens=ROOM - 8)))) == ROOM - 8
    with pytest.raises(RequestError, match=r"has 8 tokens, and 41 more .* room for 48 together; ask for 40 at most"):
        list(llama.stream(ask("7" * 7, tokens=ROOM - 7)))


def test_numbers_that_are_none_are_an_error(llama: CausalModel) -> None:
    with torch.no_grad():
        llama.parts()["model"].lm_head.weight[5] = float("nan")
    with pytest.raises(ModelError, match=r"NaN.*set WARMSTART_DTYPE"):
        llama.run(ask("a"))


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        (planned(room=65), "cache_tokens is 65, but the model was made for 64 tokens"),
        (planned((1, 48)), "a prefill of 48 tokens is planned, and cache_tokens is 48, so no token could follow"),
        ([Request("a", {"prompt": ""})], "a planned request has no input 'prefill'"),
    ],
)
def test_a_plan_that_cannot_be_served_is_refused(llama_dir: Path, plan: list[Request], told: str) -> None:
    with pytest.raises(ModelError, match=told):
        load(llama_dir, plan)


def test_a_model_with_another_kind_of_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="MambaForCausalLM cannot keep the keys and values"):
        load(saved(tmp_path / "mamba", MAMBA))


def test_a_directory_that_is_not_complete_is_refused(llama_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((llama_dir / "config.json").read_text())
    with pytest.raises(ModelError, match=r"cannot be loaded .* Check WARMSTART_MODEL"):
        load(tmp_path)


def test_weights_that_are_pickles_are_refused(llama_dir: Path, tmp_path: Path) -> None:
    for path in llama_dir.iterdir():
        if path.suffix == ".json":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    plain = AutoModelForCausalLM.from_pretrained(llama_dir)
    torch.save(plain.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(tmp_path)


def test_the_family_is_what_the_directory_says(tmp_path: Path, llama_dir: Path) -> None:
    assert family(str(llama_dir), []) == "causal"
    for content in (None, "{", "{}", json.dumps({"architectures": ["BertModel"]}), json.dumps(["no object"])):
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(ModelError, match="it is not known how to load it"):
            family(str(tmp_path), planned())
    (tmp_path / "model_index.json").write_text("{}")
    assert family(str(tmp_path), planned()) == "diffusers"


def test_the_family_of_what_is_at_the_hub_is_what_the_plan_says() -> None:
    assert family("owner/name", planned()) == "causal"
    assert family("owner/name", [Request("64x64", {"prompt": "a cat", "width": 64})]) == "diffusers"
