"""Templates of strangers end soon, with a one-line error and in little memory."""

from __future__ import annotations

import gc
import json
import resource
import signal
import sys
import time

import pytest

from launcher.data.chat.checks import check_first_rows
from launcher.data.chat.conversation_files import BadRow, Conversation
from launcher.data.chat.template import ChatTemplate, TemplateLimit
from launcher.job.schema.data import Chat
from launcher.untrusted.bounded import TooLong, bounded
from tests.data.chat.chats import CHATML, messages

SAID = Conversation(({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}), 1)
LOOP = "{% for a in range(90000) %}"
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
"""Python drops an alarm that arrives while it deletes an object, and warns; the next alarm ends the template."""

ENDLESS = {
    "loops": LOOP * 3 + "{% endfor %}" * 3,
    "a text that doubles": "{% set n = namespace(x='aaaaaaaa') %}" + LOOP + "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "a list that doubles": "{% set n = namespace(x=[1]) %}" + LOOP + "{% set n.x = n.x + n.x %}{% endfor %}",
    "a power": "{{ 10 ** 10 ** 9 }}",
    "a power of powers": "{{ ((999 ** 999) ** 999) ** 999 }}",
    "a product": "{{ 'a' * 10000000000 }}",
    "a product of a list": "{{ [0] * 10000000000 }}",
    "a wide format": "{{ '%10000000000d' % 1 }}",
    "blanks": "{{ 'a'.center(10000000000) }}",
    "a filter": "{{ 'a' | center(10000000000) }}",
    "a macro of itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
}


@pytest.fixture(autouse=True)
def no_callbacks():
    """Hypothesis has a callback in the garbage collector; pytest reports exceptions that Python drops there."""
    kept = gc.callbacks[:]
    gc.callbacks.clear()
    yield
    gc.callbacks[:] = kept


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_a_template_that_does_not_terminate_makes_a_bad_row(source):
    limits, handler = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGALRM)
    template = ChatTemplate(source, {})
    began = time.monotonic()
    for _ in range(50):  # as many rows as a check reads
        with pytest.raises(BadRow):
            template.spans(SAID)
    assert time.monotonic() - began < 60  # 2 s on an idle machine, once
    assert (resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGALRM)) == (limits, handler)


@pytest.mark.parametrize("source", ["{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}", "{{ " + "-" * 50_000 + "1 }}"])
def test_a_template_that_is_nested_too_deeply_is_refused(source):
    with pytest.raises(ValueError, match="not a template: nested too deeply"):
        ChatTemplate(source, {}).compile()


def test_computation_during_the_compilation_of_a_template_is_limited_too():
    began = time.monotonic()
    with pytest.raises(ValueError, match="not a template: more than 2 s"):
        ChatTemplate("{{ [1] | slice(1000000000) | list | length }}", {}).compile()
    assert time.monotonic() - began < 60  # 2 s on an idle machine


class Slow:
    """Python drops an exception that arrives while it deletes this object."""

    def __del__(self):
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            pass


def endless():
    Slow()
    while True:
        pass


def test_an_alarm_that_python_drops_comes_again(monkeypatch):
    dropped, before = [], signal.getitimer(signal.ITIMER_REAL)
    monkeypatch.setattr(sys, "unraisablehook", lambda args: dropped.append(args.exc_type))
    with pytest.raises(TooLong), bounded(0.1, 1 << 30):
        endless()
    assert dropped == [TooLong]
    assert signal.getitimer(signal.ITIMER_REAL)[1] == before[1]  # the alarm of the test's own time limit


def test_small_products_are_fine():
    assert (
        ChatTemplate("{{ '-' * 20 }}{{ 2 ** 10 }}{{ 0.5 * 4 }}", {})._rendered(SAID, SAID.messages)
        == "-" * 20 + "10242.0"
    )


def test_all_renderings_of_a_plan_have_a_total(monkeypatch):
    monkeypatch.setattr("launcher.data.chat.template.SECONDS", 60.0)
    template = ChatTemplate(LOOP + "{% endfor %}" + "{{ messages[0]['content'] }}", {})
    template.limit_total(0.3)
    began = time.monotonic()
    said = None
    while said is None and time.monotonic() - began < 30:
        try:
            template._rendered(SAID, SAID.messages)
        except TemplateLimit as error:
            said = str(error)
    assert said == "the template is too slow: more than 10 s for the first conversations"


@pytest.mark.parametrize("on_bad", ["error", "skip"])
def test_a_slow_template_is_refused_at_plan_time(tmp_path, monkeypatch, on_bad):
    monkeypatch.setattr("launcher.data.chat.checks.TOTAL", 0.0)
    (tmp_path / "t.jinja").write_text(CHATML)
    (tmp_path / "a.jsonl").write_text(json.dumps(messages()) + "\n")
    settings = Chat(
        name="chat", path=str(tmp_path / "a.jsonl"), template=str(tmp_path / "t.jinja"), seq_len=64, on_bad=on_bad
    )
    reason = "the template is too slow: more than 10 s for the first conversations"
    text = f"data.template: {tmp_path}/t.jinja: {reason}: in {tmp_path}/a.jsonl:1"
    assert [str(problem) for problem in check_first_rows(settings)] == [text]
