"""A conversation with LangChain: every turn reads all turns before it from the cache, its own answers included.

    python examples/chat.py [model]

Answers go back to the model as text, and text that is tokenized again may give other tokens than the model generated.
The engine therefore remembers the tokens of its answers and puts exactly these into the next prompt. So a turn finds
the last prompt and the last answer computed, all but the answer's last token: that one was chosen, and never read.
"""

import sys
from pathlib import Path

from langchain_core.messages import AIMessageChunk, BaseMessage, HumanMessage, SystemMessage

from langchain_foreword import ChatForeword

DOCUMENT = (Path(__file__).parent / "documents" / "gettysburg_address.txt").read_text()
QUESTIONS = [
    "Who delivered the Gettysburg Address?",
    "On which date?",
    "What did he say about the dead?",
    "In which state is the cemetery?",
]


def main(model: str = "smollm2-135m") -> None:
    # The default model has 135 M parameters; a larger one, given by name, writes better answers.
    llm = ChatForeword(model=model, temperature=0, max_tokens=48)
    system = f"Answer in one short sentence, using only this document.\n\n{DOCUMENT}"
    history: list[BaseMessage] = [SystemMessage(system)]
    expected = 0
    for question in QUESTIONS:
        print(f"you:    {question}\nmodel:  ", end="", flush=True)
        history.append(HumanMessage(question))
        answer = AIMessageChunk("")
        for chunk in llm.stream(history):
            print(chunk.text, end="", flush=True)
            answer += chunk
        history.append(answer)  # the whole memory is this list; nothing about the cache has to be kept

        usage = answer.usage_metadata
        assert usage is not None  # it comes with the last chunk
        prompt, reused = usage["input_tokens"], usage["input_token_details"]["cache_read"]
        print(f"\n        [{reused} of {prompt} prompt tokens reused; {expected} expected]\n")
        expected = prompt + usage["output_tokens"] - 1


if __name__ == "__main__":
    main(*sys.argv[1:])
