"""langchain-openai, as people write it."""

from __future__ import annotations

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI


def chat(url: str, model: str, **options: object) -> ChatOpenAI:
    return ChatOpenAI(base_url=url + "/v1", api_key="anything", model=model, temperature=0, max_tokens=12, **options)


def test_invoke_and_its_usage(url: str, model: str) -> None:
    answer = chat(url, model).invoke([SystemMessage("Be brief."), HumanMessage("What is the capital of France?")])
    assert isinstance(answer, AIMessage)
    assert "Paris" in answer.text
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] > 0


def test_a_stream_says_what_an_invoke_says(url: str, model: str) -> None:
    llm = chat(url, model, stream_usage=True)
    chunks = list(llm.stream("Name a colour."))
    assert len(chunks) > 2
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.text == llm.invoke("Name a colour.").text
    assert whole.usage_metadata is not None


def test_a_batch_and_a_chain(url: str, model: str) -> None:
    chain = ChatPromptTemplate.from_messages([("human", "Say {word}.")]) | chat(url, model)
    assert all(answer.text for answer in chain.batch([{"word": word} for word in ("one", "two", "three")]))


def test_logprobs_and_several(url: str, model: str) -> None:
    result = chat(url, model, logprobs=True, top_logprobs=2, n=2).generate([[HumanMessage("Hi")]])
    assert len(result.generations[0]) == 2
    assert result.generations[0][0].message.response_metadata["logprobs"]["content"]


def test_completions(url: str, model: str) -> None:
    llm = OpenAI(base_url=url + "/v1", api_key="anything", model=model, temperature=0, max_tokens=8)
    assert "Paris" in llm.invoke("The capital of France is")
    assert "".join(llm.stream("The capital of France is")) == llm.invoke("The capital of France is")
