//! `cargo run --example dump_block -- TARGET DRAFT IDS OUT`: writes the logits of one drafted block (see block.rs).

mod block;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [target, draft, ids, out] = &arguments[..] else {
        return Err("give the folders of target and drafter, ids such as 1,2,3, and the file to write".into());
    };
    let ids = ids.split(',').map(str::parse).collect::<Result<Vec<u32>, _>>()?;
    draftmill::model::libtorch::init_libtorch()?;
    let slots = block::dump_block(target.as_ref(), draft.as_ref(), &ids, out.as_ref())?;
    println!("{out}: logits of {slots} slots");
    Ok(())
}
