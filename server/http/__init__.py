"""The HTTP surface: SGLang's native shape, OpenAI's, and questions about the instance."""
