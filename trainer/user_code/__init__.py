"""Users' judges and tools: found by name (`targets`), run in processes of their own with a time
limit (`pool`, `worker`).
"""

__all__: list[str] = []
