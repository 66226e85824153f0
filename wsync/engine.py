"""The control half that every engine shares: worker calls, attempts, states. Adapters add how to reach the workers."""
