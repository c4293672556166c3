"""A model-based fuzzer of the whole engine: random operations on a real one, every output against a reference.

===============  ====================================================================================================
``cases``        what is asked: prompts that share beginnings, and every kind of sampling
``chats``        conversations: a chat template for the tiny model, and turns that go on where answers ended
``options``      what an engine may be built with: a table
``reference``    what a request must give: the same one computed alone by an engine that caches nothing
``faults``       errors put into the forward pass, the sampler, the detokenizer, the tokenizer
``disk``         directories for the disk tier, what they may hold, and what happens to the disk under them
``pins``         what pins promise, beside the engine's own ledger of them
``claims``       what the engine says of its cache, against all that was asked of it
``submission``   one request on its way, and how what came of it may differ from the reference
``life``         one engine from its start to its close, and what must hold in between and at the end
``operations``   what may happen to it: a table of small functions with weights
``driver``       plans from seeds, epochs of operations, threads, memory, the smallest plan that still fails
===============  ====================================================================================================

``python -m tests.fuzz --operations 200000 --seed 1`` runs it for long; ``--seed 1 --epoch 17`` runs one epoch again.
"""
