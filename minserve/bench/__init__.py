"""Load against any OpenAI-compatible server: `minserve bench`. Nothing of the engine is imported here."""
