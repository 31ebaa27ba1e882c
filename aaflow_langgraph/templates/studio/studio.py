"""What ``langgraph dev`` asks for beside the graphs: where threads are kept, and a page at /kv that shows their KV."""

from kv import HERE, broker

from aaflow_langgraph import KVCheckpointSaver


def checkpointer():
    return KVCheckpointSaver.local(HERE / "checkpoints", broker)
