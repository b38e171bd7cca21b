"""Word lists of the prose check. Words are in lower case."""

from __future__ import annotations


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


FRAGMENT_OPENERS = _words(
    "of for that those until by beyond behind between and but or nor than which who whom whose whoever them"
)
"""First words of a docstring that continues something which is not there; "the same" is one as well."""

PERSON_WORDS = _words("who whom whose whoever whomever nobody somebody anybody everybody")
"""Words for people, which stand for requests, pages and processes too often."""

NO_VERBS = _words(
    """
    a an the this that these those one ones some any each every everything all both half more most least many much
    few other others another such same nothing none no not nobody somebody whoever whatever whichever

    i me my we us our ours you your it its itself they them their theirs he she his her

    who whom whose what which where whether when while why how if unless until since because though although so as
    than too also again now then here there once only even just already still yet

    of for by from to in into on onto at with within without beyond behind between beside below above after before
    about over under up down out off back near per and or but nor instead

    is are was were be been being am has have's had does did will would shall should can could may might must

    first second third last next new old two three four five zero whole empty endless distinct other

    addresses array arrays attention batches blocks bodies boolean byte bytes cached capability channels
    client clients column columns connection connections conversations core cores cpu cpus decisions default
    descriptors device directly distinct durations elements entries entry error errors events evicted experts false
    fields figures float following forward frames gauge greedy headers hosts hundreds instance instances int integer
    invariants itl json json-ready keys kv latencies layer layers length libraries lines little-endian logits longest
    masses matrices median medians memory message messages microseconds milliseconds modules nanoseconds news niceness
    numbers objects oldest operations options output outputs pages pairs parameters parts peer peers phases pid pieces
    places port ports positions prefix prefixes prompt prompts prose radians random readable registers request
    requests reservations room rooms rows scattered seconds segmented sessions several short six sizes slots small
    smallest something spans state steps streams sums text texts threads throughput times titles token tokens top-p
    true ttft value values vector verdicts weights windows words zeros
    """
)
"""First words that begin no sentence of the form "Release a pin" or "Releases a pin".

Words that are verbs as well ("number the rows") are left out. A word that is not listed counts as a verb.
"""
