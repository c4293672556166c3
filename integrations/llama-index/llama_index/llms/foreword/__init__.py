"""LlamaIndex LLM that runs on a Foreword engine in this process."""

from llama_index.llms.foreword.base import Foreword

__all__ = ["Foreword"]
