"""FastAPI: routes of its own, and the engine's HTTP API below /llm.

Both live in one process. The application starts the engine, in the event loop of its server, and closes it. Its own
routes call the engine as any program does; a request whose client leaves is aborted below /llm.
"""

import argparse
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from asyncengine import AsyncEngine, SamplingParams, bundled_model
from asyncengine.server import ServerConfig, asgi_app

try:
    import uvicorn
    from fastapi import FastAPI
except ImportError:
    sys.exit("this example needs FastAPI and uvicorn: pip install fastapi uvicorn")


def make_app(model: str) -> FastAPI:
    engine = AsyncEngine.from_pretrained(model)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with engine:
            yield

    app = FastAPI(lifespan=lifespan)
    app.mount("/llm", asgi_app(engine, ServerConfig(served_model_name="stories", page=False)))

    @app.get("/story")
    async def story(animal: str = "fox") -> dict[str, str]:
        prompt = f"Once upon a time there was a little {animal}"
        output = await engine.generate(prompt, SamplingParams(max_tokens=40, temperature=0))
        return {"text": prompt + output.text}

    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=bundled_model(), help="directory or hub id (default: bundled)")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: 8000)")
    args = parser.parse_args()
    print(f"a request to try: curl 'http://127.0.0.1:{args.port}/story?animal=bear'; an OpenAI client takes /llm/v1")
    uvicorn.run(make_app(args.model), host="127.0.0.1", port=args.port)
