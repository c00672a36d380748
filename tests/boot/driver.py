"""Runs in a fresh process: boots the project in the current directory, does what it is told, prints JSON last.

python tests/boot/driver.py '{"draw": [["7", "1:1", 1, 8, 1.0, 5]], "threads": 5, "before": "code to run first"}'
"""

import hashlib
import importlib
import json
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path.cwd()))


def main() -> None:
    order = json.loads(sys.argv[1])
    names: dict = {}
    exec(order.get("before", ""), names)

    predict = importlib.import_module(order.get("predictor", "predict"))
    import warmstart

    plan = names.get("PLAN", predict.plan())
    model = warmstart.boot(plan, sources=[predict.__file__], load=names.get("LOAD"))
    answer = {"report": json.loads(model.report.json()), "drawn": [], "threads": []}
    for inputs in order.get("draw", []):
        answer["drawn"].append(draw(model, predict.request(*inputs), order.get("folder")))
    for _ in range(order.get("threads", 0)):
        in_thread(lambda: answer["threads"].append(ask_all(model, plan)))
    if "after" in order:
        names["model"] = model
        exec(order["after"], names)
        answer["after"] = names["answer"]
    # What a request compiled is saved beside it, with a line of its own; the answer comes after that.
    model.save(60)
    print("\n" + json.dumps(answer))


def draw(model, request, folder) -> dict:
    """One request's pictures by digest; kept as PNG where a folder is given."""
    result = model(request)
    digests = [hashlib.sha256(image.tobytes()).hexdigest() for image in result.outputs]
    if folder:
        for digest, image in zip(digests, result.outputs, strict=True):
            image.save(Path(folder) / f"{digest}.png")
    return {"label": request.label, "pictures": digests, "graphs": result.graphs, "reason": result.reason}


def ask_all(model, plan) -> dict:
    """Each planned request once from this thread: by its label, the graphs compiled, or why it was not all compiled."""
    results = {request.label: model(request) for request in plan}
    told = {label: result.reason or result.graphs for label, result in results.items()}
    return told | {"thread": threading.current_thread().name}


def in_thread(work) -> None:
    errors = []

    def body() -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - raised again in the main thread
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


main()
