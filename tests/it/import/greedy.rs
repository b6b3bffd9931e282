//! The imported target continues two prompts with the token ids that transformers generates.

use super::smollm2::{GREEDY, folder};
use draftmill::{
    hf::{config::TargetConfig, tensors::TensorFiles},
    model::{
        batch::Rows,
        target::{Depth, Target},
    },
};
use tch::{Device, Kind};

#[test]
fn greedy_ids_equal_those_of_transformers() {
    let config = TargetConfig::load(folder()).unwrap();
    let files = TensorFiles::open(folder()).unwrap();
    let target = Target::load(config, &files, Depth::Whole, Kind::Float, Device::Cpu).unwrap();
    let _no_grad = tch::no_grad_guard();
    for (question, prompt, answer) in GREEDY {
        let mut ids: Vec<i32> = prompt.iter().map(|&id| id as i32).collect();
        for &expected in answer {
            let lengths = [ids.len() as u32];
            let logits = target.trace(&Rows::new(&ids, &lengths, ids.len()).unwrap()).unwrap().logits;
            let last = logits.reshape([ids.len() as i64, -1]).get(ids.len() as i64 - 1);
            let next = last.argmax(0, false).int64_value(&[]) as i32;
            assert_eq!(next, expected as i32, "{question}, token {}", ids.len() - prompt.len());
            ids.push(next);
        }
    }
}
