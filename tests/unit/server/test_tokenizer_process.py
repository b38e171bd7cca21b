"""The tokenizer and detokenizer as the processes that they are."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq
from support.machine import limit

from pdserve.messages.base import pack_i32, unpack_i32
from pdserve.messages.channel import Receiver, Sender, ipc_address
from pdserve.messages.control import Ping, Pong
from pdserve.messages.conversation import ChatMessage, Conversation
from pdserve.messages.outputs import DetokenizeInit, ReqError, ReqTokens, TextBatch, TokenBatch
from pdserve.messages.requests import AbortReq, GenerateReq, StopReq, TokenizeReq
from pdserve.messages.routes import ToHttp, ToScheduler, ToSupervisor
from pdserve.messages.sampling import SamplingParams
from pdserve.messages.text import Encoded, EncodeReq
from pdserve.runtime.child import ChildSpec
from pdserve.runtime.signals import STOP
from pdserve.server.options import ServerOptions

MODULES = {"tokenizer": "pdserve.server.tokenizer_process", "detokenizer": "pdserve.detokenizer.process"}
PATIENCE_MS = int(1000 * limit(20))


def command(name, run_dir, **options):
    spec = ChildSpec(
        name=name,
        run_dir=str(run_dir),
        epoch="e",
        parent_pid=os.getpid(),
        options=ServerOptions(**options),
        secret="secret",
    )
    spec_file = run_dir / f"{name}.json"
    spec_file.write_bytes(msgspec.json.encode(spec))
    return [sys.executable, "-m", MODULES[name], str(spec_file)]


class Child:
    """One child process, and all that it talks to."""

    def __init__(self, name, run_dir):
        self.ctx = zmq.Context()
        declared = {"supervisor": ToSupervisor, "scheduler": ToScheduler, "http": ToHttp}
        self.receivers = {n: Receiver(self.ctx, ipc_address(run_dir, n), union) for n, union in declared.items()}
        self.sender = Sender(self.ctx, ipc_address(run_dir, name))
        started = time.monotonic()
        self.process = subprocess.Popen(command(name, run_dir), stderr=subprocess.PIPE, text=True)
        [self.ready] = self.recv("supervisor")
        self.start_seconds = time.monotonic() - started

    def send_raw(self, frame):
        self.sender._socket.send(frame)

    def recv(self, channel):
        return self.receivers[channel].recv(PATIENCE_MS)

    def close(self):
        """End the child; returns what it logged."""
        self.process.send_signal(STOP)
        _, log = self.process.communicate(timeout=limit(10))
        for receiver in self.receivers.values():
            receiver.close()
        self.sender.close()
        self.ctx.term()
        return log


@pytest.fixture
def start(tmp_path):
    children = []

    def start_one(name):
        children.append(Child(name, tmp_path))
        return children[-1]

    yield start_one
    for child in children:
        child.close()


def make_req(rid, **fields):
    return TokenizeReq(rid=rid, sampling=SamplingParams(seed=1), arrival=0.0, **fields)


def test_tokenizer_process_serves_and_survives_what_is_not_declared(start):
    child = start("tokenizer")
    assert child.ready.name == "tokenizer"
    assert 0 < child.ready.info["load_tokenizer"] < child.start_seconds
    child.send_raw(b"no message")
    child.sender.send(make_req("a", text="Hello"), make_req("bad", input_ids=[-1]), AbortReq(rid="a"), Ping(id=3))
    generate, *others = child.recv("scheduler")
    assert isinstance(generate, GenerateReq)
    assert unpack_i32(generate.input_ids).tolist() == [19556]
    assert others == [AbortReq(rid="a"), Ping(id=3)]
    [error] = child.recv("http")
    assert isinstance(error, ReqError)
    assert (error.rid, error.status) == ("bad", 400)


def test_a_chat_template_that_hangs_holds_up_conversations_alone(start):
    child = start("tokenizer")
    with template_stopped(child.process.pid):
        chats = [make_req(f"chat{i}", chat=Conversation([ChatMessage("user", "Hello")])) for i in range(10)]
        question = EncodeReq(chat=Conversation([ChatMessage("user", "Hello")]), id=8)
        child.sender.send(question, EncodeReq(texts=["Hello"], id=9))
        assert child.recv("http") == [Encoded([[19556]], id=9)], "a question about text waits for no conversation"
        child.sender.send(*chats, Ping(id=1), make_req("raw", text="Hello"), AbortReq(rid="chat9"))
        child.sender.send(Ping(id=2))
        got = []
        while not got or got[-1] != Ping(id=2):
            got += child.recv("scheduler") or pytest.fail("nothing arrives while the template hangs")
        assert [getattr(m, "rid", m) for m in got] == [Ping(id=1), "raw", Ping(id=2)]
        [ended] = child.recv("http")
        assert [(item.rid, item.finish.type.value) for item in ended.items] == [("chat9", "abort")]
    while len(got) < 12:
        got += child.recv("scheduler")
    assert [m.rid for m in got[3:]] == [f"chat{i}" for i in range(9)]
    assert {bytes(m.input_ids) for m in got[3:]} == {bytes(got[3].input_ids)}
    assert child.recv("http") == [Encoded([unpack_i32(got[3].input_ids).tolist()], id=8)]


@contextmanager
def template_stopped(tokenizer):
    """Stop the process that renders chat templates."""
    [pid] = Path(f"/proc/{tokenizer}/task/{tokenizer}/children").read_text().split()
    os.kill(int(pid), signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(int(pid), signal.SIGCONT)


def test_detokenizer_process_serves_and_survives_what_is_not_declared(start):
    child = start("detokenizer")
    assert child.ready.name == "detokenizer"
    assert 0 < child.ready.info["load_tokenizer"] < child.start_seconds
    child.send_raw(b"\x91\x81\xa4type\xa3Foo")
    init = DetokenizeInit(stop=("o",), skip_special_tokens=True, prompt_tail=pack_i32([1]))
    child.sender.send(TokenBatch(items=[ReqTokens("a", [19556], init=init)]), Pong(id=3, ready=True))
    batch, pong = child.recv("http")
    assert isinstance(batch, TextBatch)
    assert (batch.items[0].text, batch.items[0].finish.matched) == ("Hell", "o")
    assert pong == Pong(id=3, ready=True)
    assert child.recv("scheduler") == [StopReq(rid="a")]


@pytest.mark.parametrize("name", MODULES)
def test_a_tokenizer_that_is_not_there_ends_the_process_with_what_to_do(name, tmp_path):
    line = command(name, tmp_path, tokenizer_path=str(tmp_path / "nothing"))
    result = subprocess.run(line, capture_output=True, text=True, timeout=limit(60))
    assert result.returncode == 1
    assert "--tokenizer-path" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("module", MODULES.values())
def test_starting_up_imports_neither_torch_nor_transformers(module):
    code = (
        f"import sys, {module}, pdserve.server.tokenizer_process as t\n"
        "from pdserve.server.options import ServerOptions\n"
        "t.load_request_tokenizer(ServerOptions())\n"
        "print([m for m in ('torch', 'transformers', 'huggingface_hub') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=limit(60), check=True)
    assert result.stdout.strip() == "[]"
