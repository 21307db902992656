"""A peer that speaks the protocol without a model: the n-th new token of a prompt is its last token plus n.

Settings: ``fail`` is ``load``, ``run``, ``exit``, ``hang`` or ``count``, and says on what it fails once it is warm.
"""

import os
import sys
import threading

from benchmarks.peers.adapters.serve import Adapter, serve


class Fake(Adapter):
    packages = ("pytest", "no-such-package")

    def __init__(self, settings):
        self.fail = settings.get("fail")
        self.runs = 0
        print("a library that prints to stdout")
        if self.fail == "load":
            raise OSError("no weights")

    def generate(self, prompts, max_tokens):
        self.runs += 1
        print("and while it runs")
        if self.runs > 1:
            self.misbehave()
        answers = [[ids[-1] + n + 1 for n in range(count)] for ids, count in zip(prompts, max_tokens, strict=True)]
        return [row[:-1] for row in answers] if self.runs > 1 and self.fail == "count" else answers

    def misbehave(self):
        if self.fail == "run":
            raise ValueError("cannot")
        if self.fail == "exit":
            sys.stderr.write("out of memory\n")
            sys.stderr.flush()
            os._exit(9)
        if self.fail == "hang":
            threading.Event().wait()


if __name__ == "__main__":
    serve(Fake)
