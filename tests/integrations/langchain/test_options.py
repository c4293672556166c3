"""Options: nothing is dropped, a call's own come first, the LLM cache tells them apart."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import gc
import re
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache
from langchain_core.load import dumps, loads
from langchain_core.messages import HumanMessage
from pydantic import BaseModel

from foreword import EngineConfig, RequestFailedError, SamplingParams
from langchain_foreword import ChatForeword, ForewordLLM, __version__

if TYPE_CHECKING:
    from pathlib import Path

    from foreword import Engine

QUESTION = "What is the capital of France? Answer briefly."
KINDS = pytest.mark.parametrize("kind", [ChatForeword, ForewordLLM])


@pytest.fixture
def llm(engine: Engine) -> ChatForeword:
    return ChatForeword(engine=engine, temperature=0, max_tokens=12)


@KINDS
def test_every_sampling_option_is_a_field_with_the_engines_default(kind: type) -> None:
    model = kind()
    for field in dataclasses.fields(SamplingParams):
        assert field.name in kind.model_fields
    assert model._sampling(None, {}) == SamplingParams()


@KINDS
def test_unknown_and_wrong_options_raise(kind: type, engine: Engine) -> None:
    with pytest.raises(ValueError, match="has no field 'temprature'; did you mean temperature"):
        kind(temprature=0.5)
    with pytest.raises(ValueError, match=r"engine_options=\{'kv_cache_memory': \.\.\.\}"):
        kind(kv_cache_memory="1GiB")
    with pytest.raises(ValueError, match=r"did you mean engine_options=\{'max_model_len'"):
        kind(max_modellen=512)
    with pytest.raises(ValueError, match=r"'qqqq'; known are .*cache_salt.*temperature"):
        kind(qqqq=1)
    with pytest.raises(ValueError, match="top_p"):
        kind(top_p=2)
    with pytest.raises(ValueError, match="block_sise"):
        kind(engine_options={"block_sise": 8})
    with pytest.raises(ValueError, match="block_size"):
        kind(engine_options={"block_size": 7})
    with pytest.raises(ValueError, match="contradicts"):
        kind(engine=engine, model="other")
    with pytest.raises(ValueError, match="not both"):
        kind(engine=engine, engine_options={"seed": 1})
    with pytest.raises(ValueError, match=r"no foreword\.Engine"):
        kind(engine="smollm2-135m")
    model = kind(engine=engine)
    for call in (model.invoke, lambda x, **o: list(model.stream(x, **o)), lambda x, **o: model.batch([x, x], **o)):
        with pytest.raises(ValueError, match="temprature"):
            call("Hello", temprature=0.5)
        with pytest.raises(ValueError, match="temperature=-1"):
            call("Hello", temperature=-1)


@KINDS
@pytest.mark.parametrize(
    ("name", "value", "way_out"),
    [
        ("stop_sequences", ["."], "give stop$"),
        ("max_new_tokens", 8, "give max_tokens$"),
        ("max_completion_tokens", 8, "give max_tokens$"),
        ("context_window", 512, r"engine_options=\{'max_model_len': \.\.\.\}$"),
        ("num_ctx", 512, r"engine_options=\{'max_model_len': \.\.\.\}$"),
        ("base_url", "https://example.org", "not needed, the model runs in this process$"),
        ("model_kwargs", {"top_p": 0.5}, "name the options in it directly$"),
        ("model_name", "smollm2-135m", "give model$"),
        ("top_logprobs", 5, "give logprobs, which is the number of alternatives$"),
    ],
)
def test_other_integrations_words_are_understood(
    kind: type, engine: Engine, name: str, value: Any, way_out: str
) -> None:
    with pytest.raises(ValueError, match=f"'{name}': .*{way_out.removesuffix('$')}"):
        kind(**{name: value})
    with pytest.raises(ValueError, match=f"^a call takes no option '{name}': .*{way_out}"):
        kind(engine=engine).invoke("Hello", **{name: value})


@KINDS
@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("value", [True, False])
def test_logprobs_are_a_number(kind: type, engine: Engine, name: str, value: bool) -> None:
    """Pydantic would take True for 1 and False for 0, which reports the chosen token's."""
    said = f"{name}={value}: give the number of alternatives"
    with pytest.raises(ValueError, match=said):
        kind(**{name: value})
    with pytest.raises(ValueError, match=said):
        kind(engine=engine).invoke("Hello", **{name: value})


@pytest.mark.parametrize(
    ("response_format", "said"),
    [
        ({"type": "json"}, "unknown type 'json': did you mean 'json_object'?"),
        ({"type": "json_objekt"}, "unknown type 'json_objekt': did you mean 'json_object'?"),
        ({"type": "json_shema", "json_schema": {}}, "unknown type 'json_shema': did you mean 'json_schema'?"),
        ({"type": "xml"}, 'unknown type \'xml\': give {"type": "json_schema"'),
    ],
)
def test_a_response_format_of_an_unknown_type(llm: ChatForeword, response_format: Any, said: str) -> None:
    for call in (llm.invoke, lambda text, **o: llm.bind_tools([], **o).invoke(text)):
        with pytest.raises(ValueError, match=re.escape(said)):
            call(QUESTION, response_format=response_format)


def test_a_calls_own_options_come_first(llm: ChatForeword) -> None:
    assert llm.invoke(QUESTION, max_tokens=2).usage_metadata["output_tokens"] == 2
    assert llm.bind(max_tokens=3).invoke(QUESTION).response_metadata["finish_reason"] == "length"
    seeded = [llm.invoke("Tell me a story.", temperature=1.5, seed=seed).text for seed in (1, 1, 2)]
    assert seeded[0] == seeded[1] != seeded[2]


@KINDS
async def test_constructor_stop_is_honoured_and_a_calls_stop_replaces_it(kind: type, engine: Engine) -> None:
    """langchain #26810, langchain #22717."""
    prompt = "The days of the week are Monday, Tuesday,"
    free = _text(kind(engine=engine, temperature=0, max_tokens=12).invoke(prompt))
    first, second = free[4], free[8]
    model = kind(engine=engine, temperature=0, max_tokens=12, stop=[first])
    assert _text(model.invoke(prompt)) == free.split(first)[0]
    assert _text(await model.ainvoke(prompt)) == free.split(first)[0]
    assert "".join(_text(chunk) for chunk in model.stream(prompt)) == free.split(first)[0]
    assert _text(model.batch([prompt])[0]) == free.split(first)[0]
    assert _text(model.invoke(prompt, stop=[second])) == free.split(second)[0]
    assert _text(model.invoke(prompt, stop=[])) == free


def _text(answer: Any) -> str:
    return answer if isinstance(answer, str) else answer.text


@pytest.mark.usefixtures("real_engine")
def test_usage_and_metadata(cold: Engine) -> None:
    llm = ChatForeword(engine=cold, temperature=0, max_tokens=12)
    first, second = llm.invoke(QUESTION), llm.invoke(QUESTION)
    prompt = llm.get_num_tokens_from_messages([HumanMessage(QUESTION)])
    assert first.usage_metadata["input_tokens"] == second.usage_metadata["input_tokens"] == prompt
    assert first.usage_metadata["input_token_details"] == {"cache_read": 0, "cache_creation": prompt}
    assert second.usage_metadata["input_token_details"] == {"cache_read": prompt - 1, "cache_creation": 1}
    found = second.response_metadata["prefix_cache"]
    assert (found["prompt_tokens"], found["cached_tokens"], found["reason"]) == (prompt, prompt - 1, "complete")
    assert second.response_metadata["model_name"] == "smollm2-135m"
    assert second.response_metadata["finish_reason"] == "stop"
    timing = second.response_metadata["timing"]
    assert 0 < timing["time_to_first_token_s"] <= timing["total_time_s"]
    assert timing["tokens_per_second"] > 0


@pytest.mark.usefixtures("real_engine")  # a token of random ones may be part of a character
def test_logprobs_add_up_in_a_stream(llm: ChatForeword) -> None:
    whole = llm.invoke(QUESTION, logprobs=2)
    entries = whole.response_metadata["logprobs"]["content"]
    assert len(entries) == whole.usage_metadata["output_tokens"]
    assert all(entry["logprob"] == entry["top_logprobs"][0]["logprob"] <= 0 for entry in entries)
    assert "".join(entry["token"] for entry in entries) == whole.text
    total = None
    for chunk in llm.stream(QUESTION, logprobs=2):
        total = chunk if total is None else total + chunk
    assert total.response_metadata["logprobs"]["content"] == entries


def test_several_answers_to_one_prompt(llm: ChatForeword) -> None:
    result = llm.generate([[HumanMessage("Name a colour.")]], n=3, temperature=1.5, seed=7)
    answers = [generation.message for generation in result.generations[0]]
    assert len({answer.text for answer in answers}) > 1
    assert [bool(answer.usage_metadata) for answer in answers] == [True, False, False]


# -- the LLM cache ---------------------------------------------------------------------------------------------


@pytest.fixture
def llm_cache() -> Iterator[InMemoryCache]:
    cache = InMemoryCache()
    set_llm_cache(cache)
    yield cache
    set_llm_cache(None)


@KINDS
def test_llm_cache_tells_models_and_options_apart(kind: type, engine: Engine, llm_cache: InMemoryCache) -> None:
    """langchain #14590."""
    prompt = "The capital of France is"
    base = kind(engine=engine, temperature=0, max_tokens=3)
    base.invoke(prompt)
    steps = engine.stats().steps
    assert _text(base.invoke(prompt)) == _text(kind(engine=engine, temperature=0, max_tokens=3).invoke(prompt))
    assert engine.stats().steps == steps  # both came from the cache
    for size, other in enumerate(
        (
            lambda: kind(engine=engine, temperature=0.7, max_tokens=3).invoke(prompt),
            lambda: kind(engine=engine, temperature=0, max_tokens=4).invoke(prompt),
            lambda: base.invoke(prompt, max_tokens=5),
            lambda: base.invoke(prompt, stop=["x"]),
            lambda: base.invoke(prompt, seed=3),
            lambda: base.invoke(prompt, cache_salt="tenant"),
            lambda: base.invoke(prompt, {"configurable": {"cache_salt": "other tenant"}}),
            lambda: base.invoke(prompt, structured={"choices": ["Paris"]}),
        ),
        start=2,
    ):
        other()
        assert len(llm_cache._cache) == size


@KINDS
def test_identifying_params_hold_model_engine_and_sampling(kind: type, engine: Engine) -> None:
    params = kind(engine=engine, temperature=0.25)._identifying_params
    assert params["model"] == engine.model
    assert params["temperature"] == 0.25
    assert {field.name for field in dataclasses.fields(SamplingParams)} <= params.keys()
    named = {"model": engine.model, "temperature": 0.25}
    assert params == kind(**named)._identifying_params  # the shared engine is the same one
    assert params != kind(**named, engine_options={"dtype": "float32"})._identifying_params
    assert params != kind(temperature=0.25, model="other")._identifying_params


# -- what LangChain asks for -----------------------------------------------------------------------------------


@KINDS
def test_langsmith_params(kind: type) -> None:
    model = kind(temperature=0.5, max_tokens=7, stop=["x"])
    params = model._get_ls_params()
    assert (params["ls_provider"], params["ls_model_name"]) == ("foreword", "smollm2-135m")
    assert (params["ls_temperature"], params["ls_max_tokens"], params["ls_stop"]) == (0.5, 7, ["x"])
    assert params["ls_model_type"] == ("chat" if kind is ChatForeword else "llm")
    assert model._get_ls_params(model="other", stop=["y"])["ls_model_name"] == "other"
    assert model._get_ls_params(stop=["y"])["ls_stop"] == ["y"]
    assert model.metadata["lc_versions"]["langchain-foreword"] == __version__
    assert "langchain-core" in model.metadata["lc_versions"]


@KINDS
def test_engine_stays_out_of_serialisation_and_repr(kind: type, engine: Engine) -> None:
    model = kind(engine=engine, temperature=0.25)
    assert "Engine(" not in repr(model)
    assert "engine" not in dumps(model).replace("langchain_foreword", "")
    again = loads(dumps(model), allowed_objects=[kind], valid_namespaces=["langchain_foreword"])
    assert (again.model, again.temperature, again.engine) == (engine.model, 0.25, None)
    assert copy.deepcopy(model).get_engine() is engine


# -- limits ----------------------------------------------------------------------------------------------------


async def test_timeout_cancels_the_request(engine: Engine, idle: Callable[[], None]) -> None:
    llm = ChatForeword(engine=engine, temperature=0, max_tokens=4000, ignore_eos=True, timeout=0.2)

    async def streamed() -> Any:
        return [chunk async for chunk in llm.astream(QUESTION)]

    def in_a_thread(call: Callable[[], Any]) -> Any:
        return asyncio.to_thread(call)

    calls: list[Callable[[], Any]] = [
        lambda: in_a_thread(lambda: llm.invoke(QUESTION)),
        lambda: in_a_thread(lambda: list(llm.stream(QUESTION))),
        lambda: llm.ainvoke(QUESTION),
        streamed,
    ]
    for call in calls:
        with pytest.raises(TimeoutError, match=r"timeout=0\.2 seconds"):
            await call()
        idle()
    with pytest.raises(TimeoutError):
        llm.invoke(QUESTION)  # on the event loop's own thread
    assert llm.invoke(QUESTION, timeout=None, max_tokens=2).usage_metadata["output_tokens"] == 2
    assert (await llm.ainvoke(QUESTION, timeout=60, max_tokens=2)).text == llm.invoke(QUESTION, max_tokens=2).text
    with pytest.raises(ValueError, match="timeout"):
        ChatForeword(timeout=0)
    for wrong in ({"timeout": -1}, {"timeout": "a minute"}, {"max_retries": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            llm.invoke(QUESTION, **wrong)


async def test_failed_computations_are_repeated(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """`max_retries`: what fails inside the engine is asked again, unless some of a stream was shown already."""
    from foreword.text.detokenizer import IncrementalDetokenizer

    llm = ChatForeword(engine=engine, temperature=0, max_tokens=4, max_retries=2)
    expected = llm.invoke(QUESTION).text
    append, fail_at, calls = IncrementalDetokenizer.append, {0, 1}, 0

    def fail(self: Any, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls - 1 in fail_at:
            raise RuntimeError("broken on purpose")
        return append(self, *args)

    monkeypatch.setattr(IncrementalDetokenizer, "append", fail)

    async def streamed() -> str:
        return "".join([chunk.text async for chunk in llm.astream(QUESTION)])

    async def answered() -> str:
        return (await llm.ainvoke(QUESTION)).text

    asks: list[Callable[[], Any]] = [
        lambda: asyncio.to_thread(lambda: llm.invoke(QUESTION).text),
        lambda: asyncio.to_thread(lambda: "".join(chunk.text for chunk in llm.stream(QUESTION))),
        answered,
        streamed,
    ]
    for ask in asks:
        calls = 0
        assert await ask() == expected
        assert calls > 4  # two failed, then one for each token
        calls = 0
        with pytest.raises(RequestFailedError):
            llm.invoke(QUESTION, max_retries=1)
    calls, fail_at = 0, {2}
    stream = llm.stream(QUESTION)
    assert next(stream).text
    with pytest.raises(RequestFailedError):
        list(stream)


# -- the engine ------------------------------------------------------------------------------------------------


@KINDS
def test_a_models_own_name_per_call(kind: type, engine: Engine) -> None:
    own = kind(model=engine.model, temperature=0, max_tokens=2)
    assert _text(kind(temperature=0, max_tokens=2).invoke("Hello", model=engine.model)) == _text(own.invoke("Hello"))
    with pytest.raises(ValueError, match="cannot run on the engine given"):
        kind(engine=engine).invoke("Hello", model="other")


def test_close_frees_the_engine_and_it_can_be_rebuilt(chat_dir: Path) -> None:
    """llama_index #12492."""
    options = {"max_model_len": 512, "kv_cache_memory": "32MiB"}
    llm = ChatForeword(model=str(chat_dir), temperature=0, max_tokens=4, engine_options=options)
    twin = ChatForeword(model=str(chat_dir), temperature=0, engine_options=options)
    answer = llm.invoke(QUESTION)
    first = llm.get_engine()
    pool = weakref.ref(first._loop.core.runner.pool)
    assert first.max_model_len == 512
    assert twin.get_engine() is first
    llm.close()
    assert not first.closed
    twin.close()
    assert first.closed
    gc.collect()
    assert pool() is None  # though the engine is still referred to
    assert llm.invoke(QUESTION).text == answer.text
    second = llm.get_engine()
    assert second is not first
    llm.close()
    llm.close()
    assert second.closed


def test_a_given_engine_is_not_closed(engine: Engine) -> None:
    ChatForeword(engine=engine).close()
    assert not engine.closed


def test_engine_option_names_are_the_engines() -> None:
    names = {field.name for field in dataclasses.fields(EngineConfig)} - {"model"}
    assert ChatForeword(engine_options={name: getattr(EngineConfig(model="x"), name) for name in names})


def test_a_stream_behind_others_ends_in_time(engine: Engine, idle: Callable[[], None]) -> None:
    """Waiting for the first piece counts, and nobody's event loop is needed for it."""
    llm = ChatForeword(engine=engine, temperature=0, ignore_eos=True)
    assert "".join(chunk.text for chunk in llm.stream(QUESTION, timeout=60, max_tokens=8)) == (
        llm.invoke(QUESTION, max_tokens=8).text
    )
    with pytest.raises(TimeoutError, match=r"timeout=0\.001"):
        list(llm.stream(QUESTION, timeout=0.001, max_tokens=200))
    stream = llm.stream(QUESTION, timeout=60, max_tokens=200)
    next(stream)
    stream.close()
    idle()


def test_a_salt_is_no_public_matter() -> None:
    """Neither the model's repr nor what tracers are told shows it; the LLM cache still tells tenants apart."""
    llm = ChatForeword(cache_salt="tenant-7")
    assert "tenant-7" not in repr(llm)
    assert "tenant-7" not in str(llm._get_invocation_params(cache_salt="tenant-7"))
    keys = {llm._get_llm_string(cache_salt=salt) for salt in ("tenant-7", "tenant-8")}
    assert len(keys) == 2
    assert ChatForeword(cache_salt="tenant-8")._get_llm_string() != llm._get_llm_string()


def test_classes_of_one_name_do_not_share_cache_entries() -> None:
    first, second = (type("Answer", (BaseModel,), {"__annotations__": {name: int}}) for name in ("a", "b"))
    llm = ChatForeword()
    assert llm._get_llm_string(response_format=first) != llm._get_llm_string(response_format=second)
    assert llm._get_llm_string(tools=[first]) != llm._get_llm_string(tools=[second])


@KINDS
async def test_a_prompt_that_does_not_fit_is_langchains_error_too(kind: type, engine: Engine) -> None:
    """Its middleware shortens a history on this error (llama_index #17496, for the words)."""
    from langchain_core.exceptions import ContextOverflowError

    llm, long = kind(engine=engine), "word " * 9000
    with pytest.raises(ContextOverflowError, match="8192"):
        llm.invoke(long)
    with pytest.raises(ContextOverflowError):
        await llm.ainvoke(long)
    with pytest.raises(ContextOverflowError):
        list(llm.stream(long))
    with pytest.raises(ContextOverflowError):
        async for _ in llm.astream(long):
            pass


def test_a_model_can_be_pickled() -> None:
    import pickle

    again = pickle.loads(pickle.dumps(ChatForeword(temperature=0.5, engine_options={"num_threads": 1})))
    assert (again.temperature, again.engine_options) == (0.5, {"num_threads": 1})


@KINDS
def test_a_model_with_an_engine_cannot_be_pickled(kind: type, engine: Engine) -> None:
    import pickle

    with pytest.raises(TypeError, match=r"an Engine cannot be pickled.* give model= and options instead"):
        pickle.dumps(kind(engine=engine))
