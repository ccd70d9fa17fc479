"""The public interface by behaviour: scripts that a stranger would write from the documents."""
