"""The conversation of the server with its nodes: answers, faults, deadlines and bytes."""

import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.server.superlink.linkstate.utils import NODE_UNAVAILABLE_ERROR_REASON

from cfl.core import ConfigError, HookError, RoundAborted
from cfl.flower import link, wire
from cfl.flower.link import Link
from cfl.flower.node import client_app
from tests.flower.federation import Clock, Network, answer, asked, raw, unavailable

DEADLINE = 5.0


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """No test waits."""
    found = Clock()
    monkeypatch.setattr(link, "time", found)
    return found


def doubled(message, context):
    return answer(message, 2 * asked(message))


def linked(network=None, **faults):
    """A link to nodes 1 to 3, which double a number. faults: of nodes, as functions from a request to a reply."""
    network = network or Network()
    for node in (1, 2, 3):
        network.add(node, doubled)
    network.fault = lambda node, message, deliver: faults.get(f"node{node}", lambda message: deliver())(message)
    return Link(network, DEADLINE)


def ask(line, **more):
    return line.ask("query.join", {2: 20, 1: 10, 3: 30}, **more)


def test_answers_come_in_the_order_of_the_requests():
    assert [(node, found.value, found.fault) for node, found in ask(linked()).items()] == [
        (2, 40, None),
        (1, 20, None),
        (3, 60, None),
    ]


def test_no_request_is_no_question(clock):
    assert linked().ask("train", {}) == {} and clock.now == 0


def test_a_node_that_never_answers_is_at_fault_after_the_deadline(clock):
    found = ask(linked(node1=lambda message: None))
    assert found[1] == link.Answer(fault="it did not answer within 5 seconds")
    assert (found[2].value, found[3].value) == (40, 60)
    assert DEADLINE <= clock.now < DEADLINE + 2 * Link.patience


def test_nodes_that_answer_are_not_waited_for_longer(clock):
    """The reply of node 1 takes a second."""
    slow = []

    class Slow(Network):
        def pull_messages(self, ids):
            found = list(super().pull_messages(ids))
            slow.extend(reply for reply in found if reply.metadata.src_node_id == 1)
            here = [reply for reply in found if reply.metadata.src_node_id != 1]
            return here if clock.now < 1 else [*here, *slow]

    line = linked(Slow())
    assert [found.value for found in ask(line).values()] == [40, 20, 60]
    assert 1 <= clock.now < 1 + 2 * Link.patience


def test_a_late_answer_is_not_taken_for_the_next():
    """The reply to the first request arrives after the deadline, and the second request is lost."""
    line, late = linked(), []
    line.grid.fault = lambda node, message, deliver: late.append(deliver()) if node == 1 else deliver()
    assert ask(line)[1].fault == "it did not answer within 5 seconds"
    line.grid.arrives(late.pop())
    assert ask(line)[1].fault == "it did not answer within 5 seconds"


ERRORS = {
    "with a reason": (Error(0, "the app crashed"), "the app crashed"),
    "without": (Error(2), "its error has the code 2"),
    "of a message that expired": (Error(3, "not found"), "it did not answer within 5 seconds"),
    "of a reply that expired": (Error(4, "not found"), "it did not answer within 5 seconds"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_of_flower_is_a_fault(name, clock):
    error, text = ERRORS[name]
    found = ask(linked(node1=lambda message: Message(error, reply_to=message)))
    assert found[1] == link.Answer(fault=text) and found[2].value == 40
    assert clock.now == 0


def test_an_error_of_the_superlink_names_its_reason(clock):
    found = ask(linked(node1=unavailable, node3=unavailable))
    assert [found[node].fault for node in (1, 2, 3)] == [
        NODE_UNAVAILABLE_ERROR_REASON,
        None,
        NODE_UNAVAILABLE_ERROR_REASON,
    ]


def test_a_node_that_the_superlink_has_lost_costs_no_time(clock):
    found = ask(linked(node1=unavailable, node3=unavailable))
    assert found[1].fault and found[3].fault and found[2].value == 40
    assert clock.now == 0


@pytest.mark.parametrize("instead", ["", None])
def test_a_request_that_the_superlink_refuses_is_a_fault(instead, clock):
    """Over HTTP, Flower gives an empty id for a node that it does not know; in memory, it leaves the id out."""

    class Refusing(Network):
        def push_messages(self, messages):
            messages = list(messages)
            ids = super().push_messages(messages)
            kept = [id for id, message in zip(ids, messages) if message.metadata.dst_node_id != 1]
            return kept if instead is None else [*kept, instead]

        def pull_messages(self, ids):
            return [*super().pull_messages(ids), *([odd] if "" in ids else [])]

    line = linked(Refusing())  # the network has to be there before a message
    odd = Message(Error(3, "Message Unavailable"), reply_to=Message(RecordDict(), 1, "train"))
    found = ask(line)
    assert found[1].fault and (found[2].value, found[3].value) == (40, 60)
    assert clock.now == 0


class Odd(Exception):
    pass


RAISED = {
    "of cfl": (ConfigError("set a lower threshold"), "set a lower threshold", "ConfigError"),
    "of a hook": (HookError("penalty failed"), "penalty failed", "HookError"),
    "of an aborted round": (RoundAborted("too few"), "too few", "RoundAborted"),
    "of Python": (KeyError("weight"), "KeyError: 'weight'", "KeyError"),
    "with several lines": (ValueError("one\n  two"), "one two", "ValueError"),
    "of its own": (Odd("why"), "Odd: why", "Odd"),
    "without a text": (Odd(), "Odd", "Odd"),
    "of the memory": (MemoryError(), "MemoryError", "MemoryError"),
}


@pytest.mark.parametrize("name", RAISED)
def test_an_exception_of_a_node_arrives_with_its_class(name):
    error, text, kind = RAISED[name]

    def build():
        raise error

    line = linked()
    line.grid.add(1, client_app(build))
    found = ask(line)
    assert found[1] == link.Answer(fault=text, error=kind) and found[3].value == 60


ODD = {
    "garbage for tensors": lambda message: raw(message, data=b"garbage"),
    "a text that ends too early": lambda message: raw(message, '["list",[1'),
    "no records": lambda message: Message(RecordDict(), reply_to=message),
    "tensors of Flower": lambda message: raw(message, stype="numpy.ndarray"),
}


@pytest.mark.parametrize("name", ODD)
def test_a_damaged_answer_is_a_fault(name):
    found = ask(linked(node1=ODD[name]))
    assert found[1].value is None and found[2].value == 40
    assert "damaged" in found[1].fault or "must come as safetensors" in found[1].fault


def test_an_answer_with_an_empty_entry_is_a_fault():
    records = RecordDict({"more": ConfigRecord({"a": ""})})
    assert ask(linked(node1=lambda message: Message(records, reply_to=message)))[1].fault


def test_bytes_are_those_of_requests_and_answers():
    """A request is the text `10`, and an answer the same number of digits; no tensors."""
    line = linked()
    ask(line)
    each = len("body") + len("10") + len(wire.array({}).data)
    assert line.spent() == {"wire_bytes_down": 3 * each, "wire_bytes_up": 3 * each} and line.spent() == {}
    lost = linked(node1=lambda message: None)
    ask(lost)
    assert lost.spent() == {"wire_bytes_down": 3 * each, "wire_bytes_up": 2 * each}
