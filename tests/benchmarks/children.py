"""What children do that do not end well; a module of its own, for a child has to import it."""

import json
import os
import time

from benchmarks.zoo.rows import to_json


def abort(file):
    os.abort()


def fail(file):
    raise MemoryError("not enough")


def sleep(file):
    time.sleep(60)


def nothing(file):
    pass


def write(row, file):
    file.write_text(json.dumps(to_json(row)))
