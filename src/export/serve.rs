//! Command lines of the engines that serve an export.

use crate::{
    common::text::shell_word,
    hf::{draft::DraftConfig, head::HeadConfig, layout::Layout},
};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Command lines that serve a target with an export, for a POSIX shell.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServeCommands {
    /// vLLM needs the method, or it drafts with the folder as with an ordinary model and accepts nothing. It needs the number of
    /// drafted tokens too, since it reads no `block_size`.
    pub vllm: String,
    /// `None` for the speculators layout, which SGLang does not load.
    pub sglang: Option<String>,
}

impl ServeCommands {
    /// Commands for the export in `dir` with the target in `target`.
    pub fn new(dir: &Path, target: &Path, layout: Layout, draft: &DraftConfig) -> ServeCommands {
        let (folder, target) = (dir.display().to_string(), shell_word(&target.display().to_string()));
        // Both engines know DFlash 2 as DFlash, and find its head by the architecture in config.json.
        let (method, algorithm, more) = match draft.head {
            HeadConfig::Dspark(_) => {
                ("dspark", "DSPARK", format!(" --speculative-dspark-block-size {}", draft.block_size))
            }
            HeadConfig::Dflash | HeadConfig::Dflash2(_) => ("dflash", "DFLASH", String::new()),
        };
        // Written by hand for the order of the keys; the folder is the only value that needs an escape.
        let speculative = format!(
            r#"{{"method": "{method}", "model": {}, "num_speculative_tokens": {}}}"#,
            serde_json::Value::from(folder.as_str()),
            draft.proposed_tokens()
        );
        let sglang = format!(
            "python -m sglang.launch_server --model-path {target} --speculative-algorithm {algorithm} \
             --speculative-draft-model-path {}{more}",
            shell_word(&folder)
        );
        ServeCommands {
            vllm: format!("vllm serve {target} --speculative-config {}", shell_word(&speculative)),
            sglang: (layout == Layout::Zlab).then_some(sglang),
        }
    }

    /// Commands by engine.
    pub fn by_engine(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let sglang = self.sglang.as_deref().map(|command| ("SGLang", command));
        std::iter::once(("vLLM", self.vllm.as_str())).chain(sglang)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hf::{
        config::TargetConfig,
        head::{Dflash2Config, DsparkConfig, MarkovKind},
    };

    fn draft(head: HeadConfig, block_size: usize) -> DraftConfig {
        let target = TargetConfig::from_json(&serde_json::json!({
            "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 9,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50, "max_position_embeddings": 128,
            "rope_theta": 5e5,
        }));
        DraftConfig { head, ..DraftConfig::for_target(&target.unwrap(), 2, vec![1, 3], block_size, 49) }
    }

    /// DSpark proposes a token from every slot, and each engine has another name and flag for it.
    #[test]
    fn dspark_is_served_with_all_tokens_of_a_block() {
        let head = HeadConfig::Dspark(DsparkConfig { markov: MarkovKind::Vanilla, rank: 8, confidence: None });
        let commands = ServeCommands::new(Path::new("e"), Path::new("t"), Layout::Zlab, &draft(head, 7));
        assert!(commands.vllm.contains(r#"{"method": "dspark", "model": "e", "num_speculative_tokens": 7}"#));
        let sglang = commands.sglang.unwrap();
        assert!(
            sglang.contains("--speculative-algorithm DSPARK") && sglang.ends_with("-dspark-block-size 7"),
            "{sglang}"
        );
    }

    /// vLLM 0.32 refuses "dflash2" as a method.
    #[test]
    fn dflash2_is_served_by_the_method_of_dflash() {
        let config = Dflash2Config { conv_taps: 2, conv_group: 8, selector_rank: 8, selector_top_k: 4 };
        let draft = draft(HeadConfig::Dflash2(config), 8);
        let commands = ServeCommands::new(Path::new("e"), Path::new("t"), Layout::Zlab, &draft);
        assert!(commands.vllm.contains(r#"{"method": "dflash", "model": "e", "num_speculative_tokens": 7}"#));
        assert!(commands.sglang.unwrap().contains("--speculative-algorithm DFLASH "));
    }

    /// vllm#56692's thread and Draftmill's own trial: without the method vLLM 0.32 accepted 0 of 1008 drafted tokens and said
    /// nothing, and with 15 tokens for a block of 8 it drafted from slots that were never trained.
    #[test]
    fn commands_have_the_method_and_one_token_less_than_a_block() {
        let commands = |layout| {
            ServeCommands::new(Path::new("runs/a/export"), Path::new("models/t"), layout, &draft(HeadConfig::Dflash, 8))
        };
        let zlab = commands(Layout::Zlab);
        assert_eq!(
            zlab.vllm,
            r#"vllm serve models/t --speculative-config '{"method": "dflash", "model": "runs/a/export", "num_speculative_tokens": 7}'"#
        );
        assert_eq!(
            zlab.sglang.as_deref(),
            Some(
                "python -m sglang.launch_server --model-path models/t --speculative-algorithm DFLASH \
                 --speculative-draft-model-path runs/a/export"
            )
        );
        assert_eq!(commands(Layout::Speculators), ServeCommands { sglang: None, ..zlab });
    }

    /// A shell gives the engine the same folder and the same JSON, for any path.
    #[test]
    fn a_shell_hands_over_every_path_as_it_is() {
        for path in ["a b", "it's", "say \"hi\"", "$HOME `x` \\", "line\nbreak", "-f*?", "ä", "\u{1b}[31m"] {
            let commands =
                ServeCommands::new(Path::new(path), Path::new(path), Layout::Zlab, &draft(HeadConfig::Dflash, 16));
            let words = |command: &str| {
                let script = format!("for word in {command}; do printf '%s\\0' \"$word\"; done");
                let out = std::process::Command::new("bash").args(["-c", &script]).output().unwrap().stdout;
                let text = String::from_utf8(out).unwrap();
                text.split_terminator('\0').map(String::from).collect::<Vec<_>>()
            };
            let vllm = words(&commands.vllm);
            assert_eq!((vllm.len(), vllm[2].as_str()), (5, path));
            let json: serde_json::Value = serde_json::from_str(&vllm[4]).unwrap();
            assert_eq!(json["model"], path);
            assert_eq!(words(&commands.sglang.unwrap()).last().map(String::as_str), Some(path));
            assert!(commands.vllm.chars().all(|c| !c.is_control()), "{}", commands.vllm);
        }
    }
}
