"""What ``langgraph dev`` asks for beside the graphs: where threads are kept, and a page at /kv that shows their KV."""

from kv import HERE, broker

from aaflow_langgraph import KVCheckpointSaver
from aaflow_langgraph.studio import inspector_app

CHECKPOINTS = HERE / "checkpoints"


def checkpointer():
    return KVCheckpointSaver.local(CHECKPOINTS, broker)


app = inspector_app(broker, CHECKPOINTS)
