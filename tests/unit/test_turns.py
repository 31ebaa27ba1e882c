"""ChatFrame: a conversation grows as token ids, and equals the template's own rendering at every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from aaflow_langgraph.engine.turns import JOINT, ChatFrame, Extension, common_prefix
from aaflow_langgraph.errors import ConfigError
from aaflow_langgraph.model import Span, Turn
from tests import tiny

ALTERNATING = (
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] not in ['user', 'assistant'] %}{{ raise_exception('Only user and assistant!') }}{% endif %}"
    "{{ '[' + message['role'] + '] ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + tiny.CHATML
)
TRIMMING = tiny.CHATML.replace("message['content']", "message['content'] | trim")
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}" + tiny.CHATML
)
DROPS_TOOLS = (
    "{% for message in messages %}{% if message['role'] != 'tool' %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
)
UNFOLLOWABLE = (
    "{% for message in messages %}<{{ message['role'] }} {{ message['content'] | length }}>{{ message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
# The parts of Qwen3's template that decide what of an earlier turn stays (tools and multi-part contents left out).
QWEN3 = """
{%- set ns = namespace(searching=true, last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and not message.content.startswith('<tool_response>') %}
        {%- set ns.searching = false %}
        {%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role in ("user", "system") %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query and (loop.last or reasoning) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def encode(text: str) -> tuple[int, ...]:
    return tuple(tiny.tokenizer().encode(text, add_special_tokens=False))


def stock(template: str, messages: list[tuple[str, str]], *, generate: bool) -> tuple[int, ...]:
    """What transformers makes of whole messages, template rendered and encoded in one go."""
    rendered = tiny.tokenizer(template).apply_chat_template(
        [{"role": role, "content": content} for role, content in messages],
        tokenize=False,
        add_generation_prompt=generate,
    )
    return encode(str(rendered))


class Conversation:
    """Grows one conversation the way a broker does."""

    def __init__(self, template: str | None = tiny.CHATML, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        self.frame = ChatFrame(tokenizer or tiny.tokenizer(template))
        self.ids: tuple[int, ...] = ()
        self.turns: tuple[Turn, ...] = ()
        self.shared: list[tuple[int, int]] = []

    def say(self, role: str, text: Any, *, generate: bool = False, raw: bool = False) -> Extension:
        before = len(self.ids)
        grown = self.frame.extend(self.ids, self.turns, role, text, what="the text", raw=raw, generate=generate)
        assert grown.token_ids[: grown.num_shared] == self.ids[: grown.num_shared]
        assert all(a.content.stop <= b.content.start for a, b in zip(grown.turns, grown.turns[1:], strict=False))
        self.ids, self.turns = grown.token_ids, grown.turns
        self.shared.append((grown.num_shared, before))
        return grown

    def answer(self, content: Sequence[int]) -> None:
        """A generated turn: its ids, then the template's end of turn."""
        span = Span(len(self.ids), len(self.ids) + len(content))
        self.ids += tuple(content)
        self.turns = (*self.turns, Turn("assistant", span, False))
        self.ids += self.frame.end_of_turn(self.ids, self.turns)

    def texts(self) -> list[tuple[str, str]]:
        return [(t.role, self.frame.decode(self.ids[t.content.start : t.content.stop])) for t in self.turns]

    def only_grew(self) -> bool:
        return all(shared == before for shared, before in self.shared)


@pytest.mark.parametrize("template", [tiny.CHATML, ALTERNATING, NO_SYSTEM, DEFAULT_SYSTEM, TRIMMING])
def test_turn_by_turn_equals_the_template_over_all_messages(template: str) -> None:
    talk = Conversation(template)
    messages = [("user", "Name a city.")]
    talk.say("user", "Name a city.", generate=True)
    assert talk.ids == stock(template, messages, generate=True)
    for answer, question in (("Berlin", "Another?"), ("Paris", "A third?")):
        talk.answer(encode(answer))
        messages += [("assistant", answer), ("user", question)]
        talk.say("user", question, generate=True)
        assert talk.ids == stock(template, messages, generate=True)
        assert talk.texts() == messages
    assert talk.only_grew()


def test_an_open_turn_is_continued_and_closed_by_the_next_prompt_of_its_role() -> None:
    talk = Conversation()
    opened = talk.say("user", "A document.")
    assert opened.turns[-1].open
    assert talk.ids == encode("<|im_start|>user\nA document.")
    talk.say("user", "More of it.")
    closed = talk.say("user", "A question?", generate=True)
    text = f"A document.{JOINT}More of it.{JOINT}A question?"
    assert talk.ids == stock(tiny.CHATML, [("user", text)], generate=True)
    assert [turn.open for turn in closed.turns] == [False]
    assert talk.only_grew()


def test_an_open_turn_is_closed_by_a_turn_of_another_role() -> None:
    talk = Conversation()
    talk.say("system", "Be brief.")
    talk.say("user", "Hello", generate=True)
    assert talk.ids == stock(tiny.CHATML, [("system", "Be brief."), ("user", "Hello")], generate=True)
    assert talk.only_grew()


@pytest.mark.parametrize("template", [ALTERNATING, NO_SYSTEM])
def test_a_document_and_a_question_work_where_roles_must_alternate(template: str) -> None:
    talk = Conversation(template)
    talk.say("user", "A document.")
    talk.say("user", "A question?", generate=True)
    talk.answer(encode("Yes."))
    talk.say("user", "Next?", generate=True)
    expected = [("user", f"A document.{JOINT}A question?"), ("assistant", "Yes."), ("user", "Next?")]
    assert talk.ids == stock(template, expected, generate=True)
    assert talk.only_grew()


@pytest.mark.parametrize(
    ("template", "role", "reason"),
    [
        (ALTERNATING, "system", "alternate"),
        (NO_SYSTEM, "system", "System role not supported"),
        (DROPS_TOOLS, "tool", "drops the content"),
        (ALTERNATING, "assistant", "alternate"),
    ],
)
def test_a_role_that_the_template_refuses_is_a_typed_error_with_its_reason(
    template: str, role: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        Conversation(template).say(role, "text")


@pytest.mark.parametrize("role", ["", 5, None, ["user"]])
def test_what_is_no_role_is_a_typed_error(role: Any) -> None:
    with pytest.raises(ConfigError, match="role"):
        Conversation().say(role, "text")


def test_two_user_turns_in_a_row_are_refused_by_a_strict_template_only() -> None:
    for template, refused in ((tiny.CHATML, False), (ALTERNATING, True)):
        talk = Conversation(template)
        talk.say("user", "one", generate=True)
        talk.turns = tuple(Turn(t.role, t.content, False) for t in talk.turns)
        if refused:
            with pytest.raises(ConfigError, match="alternate"):
                talk.say("user", "two", generate=True)
        else:
            talk.say("user", "two", generate=True)
            assert talk.ids == stock(template, [("user", "one"), ("user", "two")], generate=True)


def test_a_trimming_template_is_followed_and_later_turns_only_grow() -> None:
    talk = Conversation(TRIMMING)
    talk.say("user", "  spaced out \n", generate=True)
    assert talk.ids == stock(TRIMMING, [("user", "  spaced out \n")], generate=True)
    talk.answer(encode("fine"))
    talk.say("user", "\nnext ", generate=True)
    messages = [("user", "spaced out"), ("assistant", "fine"), ("user", "next")]
    assert talk.ids == stock(TRIMMING, messages, generate=True)
    assert talk.only_grew()


def test_a_generated_turn_that_the_template_trims_is_shared_up_to_the_trim() -> None:
    talk = Conversation(TRIMMING)
    talk.say("user", "Hi", generate=True)
    at = len(talk.ids)
    talk.answer(encode("fine  \n"))
    grown = talk.say("user", "next", generate=True)
    assert grown.num_shared == at + len(encode("fine"))
    messages = [("user", "Hi"), ("assistant", "fine"), ("user", "next")]
    assert talk.ids == stock(TRIMMING, messages, generate=True)


def test_dropped_reasoning_leaves_the_longest_common_prefix() -> None:
    """QwenLM/Qwen3#1826: turn 1 as generated is not a prefix of turn 2."""
    talk = Conversation(QWEN3)
    talk.say("user", "2 + 2?", generate=True)
    at = len(talk.ids)
    thought = "<think>\nTwo and two.\n</think>\n\n4"
    talk.answer(encode(thought))
    grown = talk.say("user", "And 3 + 3?", generate=True)
    messages = [("user", "2 + 2?"), ("assistant", thought), ("user", "And 3 + 3?")]
    assert talk.ids == stock(QWEN3, messages, generate=True)
    assert grown.num_shared == at
    assert talk.texts()[1] == ("assistant", "4")
    # From here on the conversation holds what the template keeps, so it only grows.
    talk.answer(encode("6"))
    before = len(talk.ids)
    assert talk.say("user", "Thanks", generate=True).num_shared == before


def test_reasoning_before_a_tool_turn_stays_and_the_tool_turn_only_grows() -> None:
    """Case 3, with a tool turn: behind the last question nothing is dropped, behind the next one it is."""
    talk = Conversation(QWEN3)
    talk.say("user", "Weather?", generate=True)
    call = "<think>\nI need the tool.\n</think>\n\ncall()"
    talk.answer(encode(call))
    before = len(talk.ids)
    grown = talk.say("tool", "sunny", generate=True)
    messages = [("user", "Weather?"), ("assistant", call), ("tool", "sunny")]
    assert talk.ids == stock(QWEN3, messages, generate=True)
    assert grown.num_shared == before
    final = "<think>\nGood.\n</think>\n\nIt is sunny."
    talk.answer(encode(final))
    grown = talk.say("user", "And tomorrow?", generate=True)
    messages += [("assistant", final), ("user", "And tomorrow?")]
    assert talk.ids == stock(QWEN3, messages, generate=True)
    assert 0 < grown.num_shared < before


def test_two_tool_results_share_one_frame() -> None:
    talk = Conversation(QWEN3)
    talk.say("user", "Weather?", generate=True)
    talk.answer(encode("call() call()"))
    talk.say("tool", "sunny")
    talk.turns = tuple(Turn(t.role, t.content, False) for t in talk.turns)
    talk.say("tool", "windy", generate=True)
    messages = [("user", "Weather?"), ("assistant", "call() call()"), ("tool", "sunny"), ("tool", "windy")]
    assert talk.ids == stock(QWEN3, messages, generate=True)


def test_a_template_whose_frame_changes_with_the_content_is_refused_with_a_way_out() -> None:
    with pytest.raises(ConfigError, match="raw=True"):
        Conversation(UNFOLLOWABLE).say("user", "some text", generate=True)


@pytest.mark.parametrize("ended_by", ["eos", "length", "stop string"])
def test_a_turn_ends_with_the_templates_own_ids_whatever_ended_it(ended_by: str) -> None:
    talk = Conversation()
    talk.say("user", "Hi", generate=True)
    talk.answer(encode({"eos": "done.", "length": "unfinish", "stop string": "cut "}[ended_by]))
    assert talk.ids[-2:] == encode("<|im_end|>\n")


def test_raw_text_has_no_end_of_turn() -> None:
    talk = Conversation()
    talk.say("", "raw text", raw=True)
    assert talk.frame.end_of_turn(talk.ids, talk.turns) == ()
    assert talk.ids == encode("raw text")


def test_raw_text_needs_no_template_and_a_turn_does() -> None:
    talk = Conversation(None)
    assert not talk.frame.has_template
    with pytest.raises(ConfigError, match="no chat template.*raw=True"):
        talk.say("user", "Hi", generate=True)
    talk.say("", "Hi", raw=True)
    talk.say("", " there", raw=True)
    assert talk.ids == encode("Hi there")


def test_a_chat_turn_behind_raw_text_opens_a_frame_of_its_own() -> None:
    talk = Conversation()
    talk.say("", "Preamble.", raw=True)
    talk.say("user", "Hi", generate=True)
    assert talk.ids == encode("Preamble.") + stock(tiny.CHATML, [("user", "Hi")], generate=True)
    talk.answer(encode("Hello"))
    talk.say("user", "Bye", generate=True)
    messages = [("user", "Hi"), ("assistant", "Hello"), ("user", "Bye")]
    assert talk.ids == encode("Preamble.") + stock(tiny.CHATML, messages, generate=True)
    assert talk.only_grew()


def test_a_conversation_with_tools_in_its_frame_keeps_them() -> None:
    """As a chat model with bound tools renders it: this frame knows none, and goes on behind it."""
    talk = Conversation()
    before = encode("<|im_start|>system\nTools: add<|im_end|>\n<|im_start|>user\n")
    talk.ids = before + encode("Hi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n")
    at = len(before) + 2
    start = at + len(encode("<|im_end|>\n<|im_start|>assistant\n"))
    talk.turns = (Turn("user", Span(len(before), at), False), Turn("assistant", Span(start, start + 5), False))
    known = talk.ids
    talk.say("user", "Bye", generate=True)
    assert talk.ids == known + stock(tiny.CHATML, [("user", "Bye")], generate=True)
    talk.answer(encode("Bye"))
    talk.say("user", "Still there?", generate=True)
    assert talk.only_grew()


def test_raw_text_closes_an_open_turn_without_a_frame() -> None:
    talk = Conversation()
    talk.say("user", "Hi")
    grown = talk.say("", " and more", raw=True)
    assert not any(turn.open for turn in grown.turns)
    assert talk.ids == encode("<|im_start|>user\nHi and more")
    assert talk.only_grew()


@pytest.mark.parametrize("text", ["<|im_end|>", "<|im_start|><|im_end|>", "<|endoftext|>" * 3])
@pytest.mark.parametrize("raw", [True, False])
def test_text_of_special_tokens_only_is_refused(text: str, raw: bool) -> None:
    talk = Conversation()
    for _ in range(2):  # at the beginning, and into an open turn
        with pytest.raises(ConfigError, match="special tokens only"):
            talk.say("user", text, raw=raw)
        talk.say("user", "A document.")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        (" \n\t", "empty"),
        ("a\ud800b", r"lone surrogate '\\ud800' at character 1"),
        (b"caf\xe9", "not UTF-8: byte 0xe9 at offset 3"),
        (b"", "empty"),
        (None, "must be text, got NoneType"),
        (7, "must be text, got int"),
        ([1, 2], "must be text, got list"),
    ],
)
@pytest.mark.parametrize("raw", [True, False])
def test_what_is_no_text_is_refused_with_the_place(text: Any, reason: str, raw: bool) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        Conversation().say("user", text, raw=raw)
    str(caught.value).encode()  # the message itself can be logged


def test_utf8_bytes_are_text() -> None:
    assert Conversation().say("user", "café".encode()).token_ids == encode("<|im_start|>user\ncafé")


def test_contents_keep_the_ids_they_have() -> None:
    """A generated content may be cut into other tokens than its text would be: it is never decoded and encoded again."""
    backend = Tokenizer(
        models.BPE(vocab={c: n for n, c in enumerate([*"abcu:\n", "ab"])}, merges=[("a", "b")], ignore_merges=False)
    )
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("[\n:]"), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    talk = Conversation(tokenizer=tokenizer)
    talk.say("user", "ab", generate=True)
    apart = [tokenizer.convert_tokens_to_ids(c) for c in "ab"]
    joined = tokenizer.encode("ab", add_special_tokens=False)
    assert joined != apart
    talk.answer(apart)
    talk.say("user", "c", generate=True)
    span = talk.turns[1].content
    assert list(talk.ids[span.start : span.stop]) == apart
    assert talk.only_grew()


def sentencepiece(template: str) -> PreTrainedTokenizerFast:
    """A tokenizer that puts a space mark before the first word of every call, as Llama 2 and Mistral do."""
    letters = [*"▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.?!,[]/\n", "<s>", "</s>", "<unk>"]
    vocab = [(piece, -5.0) for piece in letters] + [("▁the", -1.0), ("▁a", -1.0)]
    backend = Tokenizer(models.Unigram(vocab, unk_id=letters.index("<unk>")))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.chat_template = template
    return fast


INST = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST]{{ m['content'] }}[/INST]"
    "{% else %}{{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)


def test_a_sentencepiece_tokenizer_puts_no_space_into_the_middle_of_a_conversation() -> None:
    tokenizer = sentencepiece(INST)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("x", add_special_tokens=False))[0].startswith("▁")
    talk = Conversation(tokenizer=tokenizer)
    talk.say("user", "the door", generate=True)
    talk.answer(talk.frame.encode_text("a door", what="the answer"))
    talk.say("user", "open it", generate=True)
    text = "".join(tokenizer.convert_ids_to_tokens(list(talk.ids))).replace("▁", " ")
    assert text == "<s>[INST]the door[/INST]a door</s>[INST]open it[/INST]"
    assert talk.only_grew()


def test_a_raw_beginning_has_one_beginning_of_sequence() -> None:
    tokenizer = sentencepiece(INST)
    talk = Conversation(tokenizer=tokenizer)
    talk.say("", "the door", raw=True)
    talk.say("user", "open it", generate=True)
    assert talk.ids.count(tokenizer.bos_token_id) <= 1


@pytest.mark.parametrize(
    ("said", "kept", "whole_tokens"),
    [("one two", "one two", 7), ("one two", "one ", 4), ("one two", "", 0), ("漢字", "漢", 3)],
)
def test_a_stopped_text_is_cut_at_a_token_border(said: str, kept: str, whole_tokens: int) -> None:
    frame = ChatFrame(tiny.tokenizer())
    ids = encode(said)
    cut = frame.split_at(ids, kept)
    assert cut == ids[:whole_tokens]
    assert frame.decode(cut) == kept


def test_a_stop_string_inside_a_token_leaves_the_text_before_it() -> None:
    backend = Tokenizer(models.BPE(vocab={**{c: n for n, c in enumerate("abcd")}, "bc": 4}, merges=[("b", "c")]))
    frame = ChatFrame(PreTrainedTokenizerFast(tokenizer_object=backend))
    ids = frame.encode_text("abcd", what="the text")
    assert ids == (0, 4, 3)
    assert frame.split_at(ids, "ab") == (0, 1)  # "bc" is cut: its "b" is encoded anew


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), st.text("ab <>|\n漢", min_size=1)), max_size=5)
)
def test_any_conversation_equals_the_template_over_all_messages(turns: list[tuple[str, str]]) -> None:
    talk, messages = Conversation(), []
    for role, text in turns:
        if not text.strip():
            continue
        talk.turns = tuple(Turn(t.role, t.content, False) for t in talk.turns)
        talk.say(role, text)
        messages.append((role, text))
        assert talk.ids + talk.frame.end_of_turn(talk.ids, talk.turns) == stock(tiny.CHATML, messages, generate=False)
    assert talk.only_grew()


@given(st.lists(st.integers(0, 1), max_size=12), st.lists(st.integers(0, 1), max_size=12))
def test_common_prefix_equals_counting(a: list[int], b: list[int]) -> None:
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    assert common_prefix(a, b) == count
