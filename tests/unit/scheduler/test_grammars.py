"""Requests with a grammar wait until the worker has compiled it, and hold up no other."""

from __future__ import annotations

import msgspec
import pytest
from support.sim import SimInstance, make_generate, make_options, reference_output

from pdserve.messages.grammar import ForgetGrammar, Grammar, GrammarPrepared, PrepareGrammar
from pdserve.messages.outputs import ReqError
from pdserve.messages.requests import AbortReq, GenerateReq
from pdserve.messages.worker import ForwardStep
from pdserve.scheduler.grammars import AT_ONCE, MAX_BYTES, MAX_UNUSED_BYTES, READY

PROMPT = [3, 5, 8, 13]
LETTERS, DIGITS = Grammar("regex", "[a-z]+"), Grammar("regex", "[0-9]+")


class Compiling(SimInstance):
    """An instance with a worker that compiles grammars when the test says so."""

    def __init__(self, **options) -> None:
        super().__init__(make_options(**options))
        self.asked: list[PrepareGrammar] = []
        self.outputs: list[list[int]] = []
        """Output that each row with a grammar began with."""
        self.forgotten: list[int] = []
        """Numbers of the grammars that the worker was told to forget."""
        self.scheduler.grammars._send = self.send

    def send(self, message: PrepareGrammar | ForgetGrammar) -> None:
        if isinstance(message, PrepareGrammar):
            self.asked.append(message)
        else:
            self.forgotten.append(message.number)

    def work(self) -> bool:
        for message in self.to_worker.messages:
            if isinstance(message, ForwardStep):
                begun = [row.output for row in message.new_rows if row.sampling.grammar is not None]
                self.outputs += [list(memoryview(output).cast("i")) for output in begun]
        return super().work()

    def settle(self) -> None:
        """Turn until the worker has nothing to do."""
        for _ in range(200):
            self.plan()
            if not self.work():
                return
        raise AssertionError("the worker is still busy")

    def submit_of(self, key: str, msg: GenerateReq) -> None:
        """Take in a request of an API key."""
        self.scheduler.arrivals.admit(msgspec.structs.replace(msg, key_name=key), self.now)

    def prepared(self, message: PrepareGrammar, nbytes: int = 0) -> None:
        self.scheduler.grammars.on_prepared(GrammarPrepared(message.number, nbytes), self.now)

    def pass_by(self, grammar: Grammar, nbytes: int = 0) -> None:
        """Have a grammar compiled for a request that is gone at once."""
        rid = f"passes by {len(self.asked)}"
        self.submit(rid, PROMPT, grammar=grammar)
        self.prepared(self.asked[-1], nbytes)
        self.scheduler.abort(AbortReq(rid))


def test_a_request_waits_for_its_grammar_and_others_pass_it() -> None:
    sim = Compiling()
    sim.submit("waits", PROMPT, grammar=LETTERS)
    sim.submit("passes", PROMPT[::-1])
    sim.settle()
    assert sim.ends.keys() == {"passes"}
    assert [message.grammar for message in sim.asked] == [LETTERS]
    assert "waits" in sim.scheduler.planner.waiting
    sim.prepared(sim.asked[0])
    sim.run_until_idle()
    assert sim.tokens["waits"] == reference_output(PROMPT, 8)
    assert sim.outputs == [[]]


def test_a_grammar_is_compiled_once_for_all_its_requests() -> None:
    sim = Compiling()
    for name in "abc":
        sim.submit(name, PROMPT, grammar=LETTERS)
    sim.submit("d", PROMPT, grammar=DIGITS)
    sim.settle()
    assert [message.grammar for message in sim.asked] == [LETTERS, DIGITS]
    sim.prepared(sim.asked[1])
    sim.settle()
    assert sim.ends.keys() == {"d"}
    sim.prepared(sim.asked[0])
    sim.run_until_idle()
    sim.submit("again", PROMPT, grammar=LETTERS)
    sim.run_until_idle()
    assert sim.ends.keys() == {*"abcd", "again"}
    assert len(sim.asked) == 2


def test_a_request_that_is_aborted_meanwhile_stays_gone() -> None:
    sim = Compiling()
    sim.submit("gone", PROMPT, grammar=LETTERS)
    sim.settle()
    sim.scheduler.abort(AbortReq("gone"))
    sim.prepared(sim.asked[0])
    sim.run_until_idle()
    assert not sim.tokens.get("gone")
    sim.scheduler.check_invariants()


def test_a_request_that_could_not_migrate_still_waits_for_its_grammar() -> None:
    sim = Compiling()
    sim.submit("waits", PROMPT, grammar=LETTERS)
    sim.settle()
    req, moves = sim.scheduler.reqs["waits"], sim.scheduler.peer_requests
    moves.hold_back(req)
    moves.go_on(req)
    sim.settle()
    assert (req.state, sim.outputs) == ("waiting", [])
    sim.prepared(sim.asked[0])
    sim.run_until_idle()
    assert sim.tokens["waits"] == reference_output(PROMPT, 8)
    sim.scheduler.check_invariants()


def test_the_grammars_that_count_as_compiled_are_few() -> None:
    sim = Compiling()
    for i in range(READY + 1):
        sim.submit(f"r{i}", PROMPT, grammar=Grammar("regex", f"a{i}"))
        sim.settle()
        sim.prepared(sim.asked[-1])
        sim.run_until_idle()
    sim.submit("first again", PROMPT, grammar=Grammar("regex", "a0"))
    sim.settle()
    assert len(sim.asked) == READY + 2
    sim.prepared(sim.asked[-1])
    sim.run_until_idle()


def test_a_retracted_request_begins_again_with_its_output() -> None:
    sim = Compiling(max_total_tokens=128, schedule_conservativeness=0.1)
    for i in range(4):
        sim.submit(f"r{i}", [i + 1] * 16, grammar=LETTERS, max_new_tokens=48)
    sim.settle()
    sim.prepared(sim.asked[0])
    sim.run_until_idle()
    assert sim.scheduler.planner.retraction.count
    again = [output for output in sim.outputs if output]
    assert again
    answers = [reference_output([i + 1] * 16, 48) for i in range(4)]
    assert all(any(answer[: len(output)] == output for answer in answers) for output in again)


def test_the_grammar_of_a_request_that_is_retracted_is_kept_until_it_ends() -> None:
    sim = Compiling(max_total_tokens=128, schedule_conservativeness=0.1)
    for i in range(4):
        sim.submit(f"r{i}", [i + 1] * 16, grammar=LETTERS, max_new_tokens=48)
    sim.prepared(sim.asked[0])
    number = sim.asked[0].number
    for i in range(2 * READY):
        sim.plan()
        sim.work()
        sim.pass_by(Grammar("regex", f"a{i}"))
        assert number not in sim.forgotten or not any(f"r{i}" in sim.scheduler.reqs for i in range(4))
    assert sim.scheduler.planner.retraction.count
    sim.run_until_idle()
    for i in range(READY):
        sim.pass_by(Grammar("regex", f"b{i}"))
    assert number in sim.forgotten


def test_unused_grammars_are_forgotten_by_their_size() -> None:
    sim = Compiling()
    for i in range(5):
        sim.pass_by(Grammar("regex", f"a{i}"), nbytes=MAX_UNUSED_BYTES // 4)
    assert sim.forgotten == [sim.asked[0].number]
    sim.pass_by(LETTERS, nbytes=MAX_UNUSED_BYTES)
    assert sim.forgotten == [message.number for message in sim.asked[:5]]


def test_no_grammar_is_compiled_while_those_of_living_requests_fill_the_memory() -> None:
    sim = Compiling()
    sim.submit("large", PROMPT, grammar=LETTERS)
    sim.prepared(sim.asked[0], nbytes=MAX_BYTES)
    sim.submit("waits", PROMPT, grammar=DIGITS)
    assert len(sim.asked) == 1
    sim.settle()
    assert sim.ends.keys() == {"large"}
    assert [message.grammar for message in sim.asked] == [LETTERS, DIGITS]
    sim.prepared(sim.asked[1])
    assert sim.forgotten == [sim.asked[0].number]
    sim.run_until_idle()
    assert sim.ends.keys() == {"large", "waits"}


def test_few_grammars_are_compiled_at_a_time_and_keys_take_turns() -> None:
    sim = Compiling()
    for i in range(AT_ONCE + 2):
        sim.submit_of("many", make_generate(f"many{i}", PROMPT, grammar=Grammar("regex", f"a{i}")))
    sim.submit_of("one", make_generate("one", PROMPT, grammar=LETTERS))
    sim.settle()
    assert len(sim.asked) == AT_ONCE
    for i in range(AT_ONCE):
        sim.prepared(sim.asked[i])
    assert LETTERS in [message.grammar for message in sim.asked[: AT_ONCE + 2]]
    for at in range(AT_ONCE, AT_ONCE + 3):
        sim.prepared(sim.asked[at])
    sim.run_until_idle()
    assert len(sim.ends) == AT_ONCE + 3


def test_no_more_grammars_are_compiled_than_the_worker_remembers_until_requests_start() -> None:
    sim = Compiling()
    for i in range(READY + 8):
        sim.submit(f"r{i}", PROMPT, grammar=Grammar("regex", f"a{i}"))
    done = 0
    while done < len(sim.asked):
        sim.prepared(sim.asked[done])
        done += 1
    assert READY <= done < READY + AT_ONCE
    for _ in range(READY):
        sim.settle()
        while done < len(sim.asked):
            sim.prepared(sim.asked[done])
            done += 1
    sim.run_until_idle()
    assert len(sim.ends) == len(sim.asked) == READY + 8


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
def test_a_grammar_is_refused_on_a_device_that_serves_none(device: str) -> None:
    sim = Compiling()
    sim.scheduler.worker.device = device
    sim.submit("r", PROMPT, grammar=LETTERS)
    sim.settle()
    if device == "cpu":
        assert sim.asked
    else:
        error = sim.ends["r"]
        assert isinstance(error, ReqError)
        assert (error.status, error.field) == (400, "grammar")
        assert "cuda:0" in error.message
