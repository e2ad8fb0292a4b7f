"""Clients of the ecosystem, unmodified, as their own users call them: only address, key and model name are given."""

import json
import re
import shutil
from pathlib import Path

import pytest

from tools.perf_analyzer import libraries_folder, link_libraries

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[1]


@pytest.mark.parametrize(
    "version", [pytest.param(name, marks=pytest.mark.client(name)) for name in ("openai", "openai-1")]
)
def test_openai(client, version):
    """models, chats, streams, tools, parse(), completions, vLLM's fields, async"""
    assert "ok" in client.program("openai_calls")


@pytest.mark.client("anthropic")
def test_anthropic(client):
    """messages whole and streamed, tools, thinking, parse(), count_tokens, beta, async"""
    assert "ok" in client.program("anthropic_calls")


@pytest.mark.client("openai", recipe="tiny-vlm-agg", model="tiny-vlm")
def test_openai_pictures(client):
    """a chat about a picture"""
    assert "ok" in client.program("openai_pictures")


@pytest.mark.client("openai", recipe="tiny-video")
def test_openai_videos(client):
    """a video job: made, polled, downloaded, listed, deleted; an image"""
    assert "ok" in client.program("openai_videos")


@pytest.mark.client("sentence-transformers", recipe="tiny-embedding")
def test_sentence_transformers(client):
    """its own embeddings of the same folder, with and without prompts, and scores, equal to the server's"""
    assert "ok" in client.program("sentence_transformers_equality")


@pytest.mark.client("openai-agents")
def test_openai_agents(client):
    """an agent over chat completions: text, a tool, a stream"""
    assert "ok" in client.program("openai_agents")


@pytest.mark.client("openai")
def test_openai_responses(client):
    """responses: create, stream, parse, tools, previous_response_id, input_items, background, cancel, delete, async"""
    assert "ok" in client.program("openai_responses")


@pytest.mark.client("openai")
def test_openai_batches(client):
    """files and batches: upload, list, a batch polled to its end, contents, a wrong line, cancel, delete"""
    assert "ok" in client.program("openai_batches")


@pytest.mark.client("openai-agents")
def test_openai_agents_as_they_come(client):
    """agents over responses: a tool, a handoff, a typed output, a stream, previous_response_id, conversations"""
    assert "ok" in client.program("openai_agents_responses")


@pytest.mark.client("langchain-openai")
def test_langchain_openai_over_responses(client):
    """ChatOpenAI(use_responses_api=True): whole, stream, tools, structured output, previous_response_id"""
    assert "ok" in client.program("langchain_responses")


@pytest.mark.client("pydantic-ai")
def test_pydantic_ai(client):
    """over chats, responses and messages: text, a tool, a stream; over chats and responses a typed output"""
    assert "ok" in client.program("pydantic_ai_agents")


@pytest.mark.client("langchain")
def test_langchain_agents(client):
    """create_agent over chats, responses and messages: whole, a tool, a stream"""
    assert "ok" in client.program("langchain_agents")


@pytest.mark.client("langchain", recipe="tiny-embedding")
def test_langchain_embeddings(client):
    """OpenAIEmbeddings: documents, a query"""
    assert "ok" in client.program("langchain_embeddings")


@pytest.mark.client("langchain-openai")
def test_langchain_openai(client):
    """ChatOpenAI: whole, stream, batch, tools, structured output; OpenAI: a completion"""
    assert "ok" in client.program("langchain_chat")


@pytest.mark.client("langchain-anthropic")
def test_langchain_anthropic(client):
    """ChatAnthropic: whole, stream, tools, token counts"""
    assert "ok" in client.program("langchain_messages")


@pytest.mark.client("vercel-ai")
def test_vercel_ai(client):
    """generateText, streamText, tools over messages, responses, chats and openai-compatible; generateObject"""
    assert "ok" in client.node_program("vercel_ai")


@pytest.mark.client("vercel-ai", recipe="tiny-embedding")
def test_vercel_ai_embeddings(client):
    """embed, embedMany"""
    assert "ok" in client.node_program("vercel_ai_embed")


@pytest.mark.client("cohere", recipe="tiny-embedding")
def test_cohere(client):
    """rerank of Client and ClientV2"""
    assert "ok" in client.program("cohere_rerank")


@pytest.mark.client("smolagents")
def test_smolagents(client):
    """OpenAIModel: whole, stream, a tool"""
    assert "ok" in client.program("smolagents_model")


@pytest.mark.client("haystack")
def test_haystack(client):
    """chat generators over chats and responses: whole, stream, a tool"""
    assert "ok" in client.program("haystack_generators")


@pytest.mark.client("haystack", recipe="tiny-embedding")
def test_haystack_embedders(client):
    """embedders of a text and of documents"""
    assert "ok" in client.program("haystack_embedders")


@pytest.mark.client("strands")
def test_strands(client):
    """agents over chats and messages"""
    assert "ok" in client.program("strands_agents")


@pytest.mark.client("agno")
def test_agno(client):
    """agents over chats, responses and messages: whole and streamed"""
    assert "ok" in client.program("agno_agents")


@pytest.mark.client("autogen")
def test_autogen(client):
    """its client whole and streamed; AssistantAgent with a tool"""
    assert "ok" in client.program("autogen_agents")


@pytest.mark.client("semantic-kernel")
def test_semantic_kernel(client):
    """its service whole and streamed, a function it calls by itself; ChatCompletionAgent"""
    assert "ok" in client.program("semantic_kernel_agents")


@pytest.mark.client("codex", recipe="long-context")
def test_codex(client):
    """codex exec as it comes: a turn with its own tools over responses"""
    provider = f'{{name="bireme", base_url="{client.url}/v1", wire_api="responses", env_key="OPENAI_API_KEY"}}'
    client.more["CODEX_HOME"] = str(client.out)
    told = client.run(
        "codex", "exec", "--skip-git-repo-check", "--json",
        "-c", 'model_provider="bireme"', "-c", f"model_providers.bireme={provider}", "-m", client.model, "Say hello.",
    )  # fmt: skip
    assert '"turn.completed"' in told and '"turn.failed"' not in told, told


@pytest.mark.client("claude-code", recipe="long-context")
def test_claude_code(client):
    """claude -p: a turn with all of its tools over messages"""
    client.more |= {
        "ANTHROPIC_BASE_URL": client.url, "ANTHROPIC_AUTH_TOKEN": "none", "CLAUDE_CONFIG_DIR": str(client.out),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }  # fmt: skip
    told = client.run("claude", "-p", "Say hello.", "--model", client.model, "--output-format", "json")
    result, _ = json.JSONDecoder().raw_decode(told, told.index('{"'))
    assert not result["is_error"] and result["usage"]["output_tokens"] > 0, told


@pytest.mark.client("opencode", recipe="long-context")
def test_opencode(client):
    """opencode run: a turn with all of its tools over chats"""
    served = {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": f"{client.url}/v1", "apiKey": "none"}}
    config = {"provider": {"bireme": {**served, "models": {client.model: {}}}}, "share": "disabled"}
    (client.out / "opencode.json").write_text(json.dumps(config))
    homes = ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "HOME")
    client.more |= dict.fromkeys(homes, str(client.out)) | {
        "OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1",
    }  # fmt: skip
    told = client.run("opencode", "run", "--format=json", f"--model=bireme/{client.model}", "Say hello.")
    assert '"step_finish"' in told and '"error"' not in told, told


@pytest.mark.client("aider", recipe="long-context")
def test_aider(client):
    """aider --message: a turn with its prompt over chats"""
    told = client.run(
        "aider", f"--model=openai/{client.model}", "--message=Say hello.", "--yes-always", "--no-git", "--no-pretty",
        "--no-check-update", "--no-show-model-warnings", "--analytics-disable", "--no-show-release-notes",
    )  # fmt: skip
    assert re.search(r"Tokens: [\d.]+k? sent, [1-9]\d* received", told), told


@pytest.mark.client("litellm")
def test_litellm_over_messages_and_responses(client):
    """as anthropic: whole, stream; responses"""
    assert "ok" in client.program("litellm_messages_and_responses")


@pytest.mark.client("litellm", recipe="tiny-embedding")
def test_litellm_embeddings(client):
    """rerank as hosted_vllm, its address with /v1 and without; embeddings"""
    assert "ok" in client.program("litellm_embeddings")


@pytest.mark.client("litellm")
def test_litellm(client):
    """as openai and as hosted_vllm: whole, stream, vLLM's fields, guided_choice, async; a text completion"""
    assert "ok" in client.program("litellm_calls")


@pytest.mark.client("instructor")
def test_instructor(client):
    """typed answers by schema and by tool, partial streams"""
    assert "ok" in client.program("instructor_models")


@pytest.mark.client("dspy")
def test_dspy(client):
    """LM whole, async and over responses; Predict and ChainOfThought with typed fields by schema; an unknown model"""
    assert "ok" in client.program("dspy_predictors")


@pytest.mark.client("llama-index")
def test_llama_index(client):
    """OpenAILike: whole, stream, async, tools, structured output; FunctionAgent"""
    assert "ok" in client.program("llama_index_chat")


@pytest.mark.client("llama-index", recipe="tiny-embedding")
def test_llama_index_retrieval(client):
    """OpenAILikeEmbedding: texts, queries, async; a VectorStoreIndex of them"""
    assert "ok" in client.program("llama_index_retrieval")


@pytest.mark.client("tritonclient")
def test_tritonclient(client):
    """http, grpc, http.aio, grpc.aio: completion; grpc stream: generate; grpc.aio stream: chat"""
    assert "ok" in client.program("triton_calls")


def lm_eval(client, model, path, tasks, *arguments):
    """Return each task's metrics."""
    shutil.copytree(HERE / "lm_eval_tasks", client.out, dirs_exist_ok=True)  # the data set is named relatively
    served = f"model={client.model},base_url={client.url}/v1/{path},num_concurrent=4,max_retries=1"
    client.run(
        "lm_eval", "run", "--model", model, "--model_args", f"{served},tokenizer={client.tokenizer}",
        "--tasks", tasks, "--include_path", ".", "--apply_chat_template", "--output_path", "results", *arguments,
    )  # fmt: skip
    (found,) = (client.out / "results").rglob("results_*.json")
    return json.loads(found.read_text())["results"]


@pytest.mark.client("lm-eval")
def test_lm_eval_completions(client):
    """lm_eval run --model local-completions: a log-likelihood and a generation task"""
    results = lm_eval(client, "local-completions", "completions", "sums_scored,sums_generated", "--batch_size", "4")
    assert results["sums_scored"]["acc,none"] >= 0.75
    assert results["sums_generated"]["exact_match,none"] >= 0.75


@pytest.mark.client("lm-eval")
def test_lm_eval_chat_completions(client):
    """lm_eval run --model local-chat-completions: a generation task"""
    results = lm_eval(client, "local-chat-completions", "chat/completions", "sums_generated")
    assert results["sums_generated"]["exact_match,none"] >= 0.75


@pytest.mark.client("guidellm")
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm(client, path):
    """guidellm run: synthetic prompts, fixed output lengths, concurrent streams of both kinds"""
    client.run(
        "guidellm", "run", "--disable-console-interactive",
        "--backend", f"kind=openai_http,target={client.url},model={client.model},request_format={path}",
        "--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=8",
        "--tokenizer", f"kind=hf_auto,model={client.tokenizer}",
        "--data", "kind=synthetic_text,prompt_tokens=30,output_tokens=8", "--output", "kind=json,path=results.json",
    )  # fmt: skip
    (benchmark,) = json.loads((client.out / "results.json").read_text())["benchmarks"]
    # Of its metrics the last request may be left out: they end with the one whose end was told last, not that ended so.
    made = benchmark["scheduler_metrics"]["requests_made"]
    assert (made["successful"], made["errored"], made["incomplete"]) == (8, 0, 0)
    lengths = benchmark["metrics"]["output_token_count"]["successful"]
    assert (lengths["min"], lengths["max"]) == (8, 8)


@pytest.mark.client("aiperf")
@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_aiperf(client, kind):
    """aiperf profile --streaming: chat and completions"""
    # After the end that it is to ignore, the model may make special tokens alone: skipped, an answer without any text.
    # Any tokens may follow then, and their text, read again, is other tokens: how many came is taken from usage.
    client.run(
        "aiperf", "profile", "--model", client.model, "--url", client.url, "--endpoint-type", kind, "--streaming",
        "--tokenizer", str(client.tokenizer), "--request-count", "12", "--concurrency", "3", "--isl", "30",
        "--osl", "8", "--extra-inputs", "ignore_eos:true", "--extra-inputs", "min_tokens:8", "--ui", "none",
        "--extra-inputs", "skip_special_tokens:false", "--use-server-token-count", "--artifact-dir", "results",
    )  # fmt: skip
    results = json.loads((client.out / "results" / "profile_export_aiperf.json").read_text())
    assert results["request_count"]["avg"] == 12 and not results.get("error_summary"), results
    lengths = results["output_sequence_length"]
    assert (lengths["min"], lengths["max"]) == (8, 8)


def perf_analyzer(client, *arguments):
    """Run it; it must have measured and met no error."""
    library_path = link_libraries(client.out / "lib", libraries_folder())
    client.more["LD_LIBRARY_PATH"] = str(library_path)
    output = client.run(
        "perf_analyzer", *arguments, "--concurrency-range=4", "--measurement-mode=count_windows",
        "--measurement-request-count=10", "--stability-percentage=999", "--max-trials=5",
    )  # fmt: skip
    assert "Failed" not in output and int(re.search(r"Request count: (\d+)", output).group(1)) >= 10, output


@pytest.mark.client("perf_analyzer")
@pytest.mark.parametrize("model", ["generate", "completion"])
def test_perf_analyzer_on_triton(client, model):
    """generate over streaming gRPC, completion over gRPC"""
    inputs = str(CHECKOUT / "benchmarks" / "inputs" / f"{model}.json")
    streaming = ["--streaming"] if model == "generate" else []
    perf_analyzer(client, "-m", model, "-u", client.triton_grpc, "-i", "grpc", "--input-data", inputs, *streaming)


@pytest.mark.client("perf_analyzer")
def test_perf_analyzer_on_openai(client):
    """--service-kind openai: chats"""
    body = {"model": client.model, "messages": [{"role": "user", "content": "What is 12 + 30?"}]}
    (client.out / "inputs.json").write_text(json.dumps({"data": [{"payload": [body]}]}))
    perf_analyzer(
        client, "-m", client.model, "-u", client.url, "--service-kind=openai", "--endpoint=v1/chat/completions",
        "--input-data=inputs.json", "--async",
    )  # fmt: skip
