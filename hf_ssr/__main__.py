"""`python -m hf_ssr`, and so `accelerate launch -m hf_ssr`: the `hf-ssr` command."""

from .cli import main

raise SystemExit(main())
