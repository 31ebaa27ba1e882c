"""A langchain-core chat model on a broker. Start at ``model.py``; import ``KVChatModel`` from ``aaflow_langgraph``."""
